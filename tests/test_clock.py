"""The clock for durations: finer than the loop's where that is coarse, and virtual where the loop is."""

from __future__ import annotations

import os
import subprocess
import sys

import anyio
import anyio.lowlevel

from envkit import clock
from envkit.http.sessions.table import SessionTable
from envkit.local_host import SlotHost
from envkit.types import Observation, Options, Reset, Step, Task
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


_CANCELLED = """
import random, sys
import anyio
from envkit import clock

kept = [bytearray(random.randrange(1, 2000)) for _ in range(random.randrange(20000))]  # another layout of the memory

async def wait(number, ended):
    try:
        with anyio.move_on_after(1e6 if number % 3 else None):
            if number % 2:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(wait, number + 1000, ended) if number < 1000 else None
                    await anyio.sleep_forever()
            await anyio.sleep(1e5 + number)
    finally:
        ended.append(number)

async def main():
    ended = []
    async with anyio.create_task_group() as tasks:
        for number in range(40):
            tasks.start_soon(wait, number, ended)
            kept.append(bytearray(random.randrange(1, 2000)))
        await anyio.sleep(60)
        tasks.cancel_scope.cancel()
    print(ended)

clock.run(main, virtual=True)
"""


def test_a_cancellation_reaches_tasks_in_the_same_order_in_every_process() -> None:
    orders = {
        subprocess.run(
            [sys.executable, "-c", _CANCELLED],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(orders) == 1
    assert len(orders.pop().split(",")) == 60


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
