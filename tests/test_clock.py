"""The clock for durations: finer than the loop's where that is coarse, and virtual where the loop is."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from envkit import clock
from envkit.http.sessions.table import SessionTable
from envkit.types import Observation, Options, Reset, Step, Task
from envkit.vector import SlotHost
from tests.http.envs import Sleeper
from tests.keys import key

SPIN_S = 2e-4


def spin() -> None:
    """Keep the processor busy for a fifth of a millisecond."""
    until = clock.stopwatch() + SPIN_S
    while clock.stopwatch() < until:
        pass


class Busy(Sleeper):
    async def reset(self, *, seed: int, options: Options) -> Reset:
        return Reset(Observation("ready"), {})

    async def step(self, action: str) -> Step:
        await anyio.lowlevel.checkpoint()
        spin()
        return Step(Observation("done"), 0.0, False, False, {})


def test_durations_below_a_millisecond_are_measured_also_in_a_loop_whose_clock_is_coarse() -> None:
    async def main() -> list[float]:
        seconds = []
        for _ in range(20):
            began = clock.precise()
            spin()
            seconds.append(clock.precise() - began)
        return seconds

    assert min(clock.run(main, fast=True)) >= SPIN_S


def test_durations_are_virtual_in_virtual_time() -> None:
    async def main() -> float:
        began = clock.precise()
        await anyio.sleep(3600)
        return clock.precise() - began

    assert clock.run(main, virtual=True) == 3600


def test_steps_shorter_than_a_millisecond_are_counted_in_the_buckets_below_it() -> None:
    async def main() -> list[int]:
        async with SessionTable(SlotHost(lambda env_id: Busy(), 1)) as table:
            await table.create(key("a"), Task("Busy-v0", 0))
            for turn in range(50):
                await table.step(key("a"), turn, "go")
            return table.counters.buckets

    buckets = clock.run(main, fast=True)
    assert sum(buckets) == 50
    assert buckets[0] == 0
    assert sum(buckets[1:3]) > 0  # 0.1 to 0.5 ms


def test_steps_in_virtual_time_take_virtual_seconds() -> None:
    async def main() -> float:
        async with SessionTable(SlotHost(lambda env_id: Sleeper(), 1)) as table:
            await table.create(key("a"), Task("Sleeper-v0", 0))
            await table.step(key("a"), 0, "sleep 5")
            return table.counters.step_seconds

    assert clock.run(main, virtual=True) == 5
