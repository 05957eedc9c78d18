"""Whether a silent env server is dead: one that computes is not, one that was stopped is, and our own sleep is ours."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxLostError
from envkit.fleet import HeartbeatTimes
from envkit.types import Step, Task
from tests import echoes
from tests.fleet.fleets import Box, Yard, play, run

PROBING = HeartbeatTimes(interval_s=1, timeout_s=3, misses=1, longest_step_s=300)


async def compute(box: Box, seconds: float) -> None:
    """Let a box's server be silent for a while, as one is whose world computes."""
    box.answers, box.computes = False, True
    await anyio.sleep(seconds)
    box.answers, box.computes = True, False


def test_a_server_that_computes_for_long_is_not_lost_and_all_its_episodes_go_on() -> None:
    async def main() -> None:
        yard = Yard()
        ends: list[str] = []
        async with yard.fleet(1, 3, probing=PROBING) as host, anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(play, host, 400, ends)
            await anyio.sleep(5.1)
            await compute(yard.boxes[0], 299)
            await anyio.sleep(200)
            assert (ends, host.lost) == (["box-0"] * 3, 0)

    run(main)


def test_a_server_that_computes_longer_than_a_step_may_is_lost_before_the_calls_that_wait_for_it_give_up() -> None:
    async def main() -> None:
        yard = Yard()
        ends: list[str] = []
        async with yard.fleet(1, 1, probing=PROBING) as host, anyio.create_task_group() as tasks:
            tasks.start_soon(play, host, 1000, ends)
            await anyio.sleep(5.1)
            with anyio.move_on_after(600):
                await compute(yard.boxes[0], 1000)
        what = "env server computed for 300 s, the limit for one step"
        assert ends == [f"305.5 sandbox box-0 lost: {what}"]

    run(main)


def test_a_server_that_hangs_is_lost_in_time_also_if_it_had_computed_before() -> None:
    async def main() -> None:
        yard = Yard()
        async with yard.fleet(1, 1, probing=PROBING) as host:
            await anyio.sleep(5.1)
            yard.boxes[0].answers = False
            await anyio.sleep(4.5)
            assert host.lost == 1
            await anyio.sleep(10)
            with anyio.move_on_after(100):
                await compute(yard.boxes[1], 1000)
            assert host.lost == 1
            yard.boxes[1].computes = False
            await anyio.sleep(5)
            assert host.lost == 2

    run(main)


def test_a_new_episode_goes_to_a_box_that_answers_before_one_that_computes() -> None:
    async def main() -> None:
        yard = Yard()
        async with yard.fleet(2, 2, probing=PROBING) as host, anyio.create_task_group() as tasks:
            tasks.start_soon(compute, yard.boxes[0], 100)
            await anyio.sleep(4)
            for _ in range(2):
                ends: list[str] = []
                tasks.start_soon(play, host, 10, ends)
            await anyio.sleep(20)
            assert [box.most_playing for box in yard.boxes] == [0, 2]
            tasks.cancel_scope.cancel()

    run(main)


def test_that_our_own_loop_was_held_up_is_nobodys_silence() -> None:
    async def main() -> None:
        async with Yard(start_s=0).fleet(5, 1, probing=HeartbeatTimes(0.1, 0.5, misses=1)) as host:
            for _ in range(3):
                await anyio.sleep(0.1)
                threading.Event().wait(1)  # everything in this process stands still
            await anyio.sleep(0.3)
            assert host.lost == 0

    clock.run(main)


class Trap(echoes.Echo):
    """A world in which an action silences its whole box."""

    async def step(self, action: str) -> Step:
        assert isinstance(self.box, TrapBox)
        self.box.hangs |= action == "deadly"
        return await super().step(action)


class TrapBox(echoes.Box):
    hangs = False

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[Trap]:
        yield Trap(self, task)

    async def answer(self) -> None:
        await self.health()
        await super().answer()

    async def health(self) -> None:
        if self.hangs:
            await anyio.sleep_forever()

    heartbeat = health


def test_an_episode_whose_own_steps_silence_boxes_is_void_after_the_second_and_others_play_on() -> None:
    async def main() -> None:
        boxes = [TrapBox(name) for name in "abcd"]
        async with echoes.fleet_of(*boxes, slots_per_sandbox=2) as host:
            task = echoes.TASK
            async with host.lease(task) as guilty, host.lease(task) as other:
                for episode in (guilty, other):
                    await episode.reset()
                    await episode.step("one")
                with pytest.raises(SandboxLostError, match="b lost: env server did not answer") as raised:
                    await guilty.step("deadly")
                assert type(raised.value) is SandboxLostError
                assert (await other.step("two")).observation.text == "3 one two"
            assert (host.lost, host.episodes.rebuilt, host.episodes.void) == (2, 2, 1)

    run(main)
