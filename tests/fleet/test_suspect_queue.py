"""Episodes that take their box with them: after the second box they are void, and those who sat with them play on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from msgspec import Raw

from envkit import clock
from envkit.errors import SandboxLostError, UnreachableError
from envkit.fleet import FleetHost
from envkit.fleet.env_worker import LostDuringCallError
from envkit.fleet.episode import EpisodeTally, FleetEpisode, Lease
from envkit.fleet.suspect_queue import TURN_S
from envkit.protocols import ResumableEpisode
from envkit.types import Reset, Step, Task
from tests.causes import cause
from tests.echoes import Box, Echo, fleet_of
from tests.fleet.fleets import run

DEADLY = 13
"""Seed of the task that kills its box where the others only take their time."""
KILLED = "killed by signal 11"
TWICE = f"{KILLED}; the previous worker was lost during the same step"


class Mine(Echo):
    """A world in which the call that its box names kills the box, or silences it, if its task is the deadly one."""

    box: MinedBox

    def __init__(self, box: Box, task: Task) -> None:
        super().__init__(box, task)
        self.is_deadly = task.seed == DEADLY

    async def reset(self) -> Reset:
        await self.tread("reset")
        return await super().reset()

    async def step(self, action: str) -> Step:
        await anyio.sleep(self.box.step_s)
        await self.tread(action)
        return await super().step(action)

    async def tread(self, call: str) -> None:
        if self.is_deadly and call == self.box.deadly:
            if self.box.is_silenced:
                self.box.hangs = True
            else:
                self.box.die(KILLED)
        await self.box.health()


class MinedBox(Box):
    """A box with a deadly call in it, whose world takes `step_s` seconds for a step."""

    hangs = False

    def __init__(self, name: str, *, deadly: str = "boom", step_s: float = 0.0, is_silenced: bool = False) -> None:
        super().__init__(name)
        self.deadly = deadly
        self.step_s = step_s
        self.is_silenced = is_silenced

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[ResumableEpisode]:
        episode = Mine(self, task)
        if self.deadly == "lease":
            await episode.tread("lease")
        yield episode

    async def health(self) -> None:
        if self.hangs:
            await anyio.sleep_forever()
        await super().health()

    heartbeat = health


class SlowBox(MinedBox):
    """A box in which the deadly step does its deed at once, while the others take 4 s."""

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[ResumableEpisode]:
        yield (Mine if task.seed == DEADLY else Slow)(self, task)


class Slow(Mine):
    async def step(self, action: str) -> Step:
        await anyio.sleep(4)
        return await super().step(action)


def mined(count: int, *, deadly: str = "boom", step_s: float = 0.0, is_silenced: bool = False) -> list[MinedBox]:
    names = (f"box-{number}" for number in range(count))
    return [MinedBox(name, deadly=deadly, step_s=step_s, is_silenced=is_silenced) for name in names]


async def ends_of(host: FleetHost, *actions: str, seeds: range, at_once: bool = True) -> dict[int, str]:
    """Play a task of each seed, and all of their steps together; say how each ended."""
    ends: dict[int, str] = {}
    is_reset = {seed: anyio.Event() for seed in seeds}

    async def play(seed: int) -> None:
        try:
            async with host.lease(Task("Echo-v0", seed)) as episode:
                await episode.reset()
                is_reset[seed].set()
                for other in is_reset.values() if at_once else ():
                    await other.wait()
                for action in actions:
                    step = await episode.step(action)
            ends[seed] = step.observation.text
        except SandboxLostError as loss:
            ends[seed] = str(loss.cause) if type(loss) is SandboxLostError else repr(loss)

    async with anyio.create_task_group() as tasks:
        for seed in seeds:
            tasks.start_soon(play, seed)
    return ends


@pytest.mark.parametrize("culprit", [0, 7, 31])
def test_of_thirty_two_steps_at_once_in_a_box_exactly_the_one_that_kills_it_is_void_for_two_boxes(
    culprit: int,
) -> None:
    async def main() -> None:
        seeds = range(DEADLY - culprit, DEADLY - culprit + 32)
        async with fleet_of(*mined(4), slots_per_sandbox=32) as host:
            ends = await ends_of(host, "one", "boom", "two", seeds=seeds)
            assert ends == {seed: TWICE if seed == DEADLY else f"{seed} one boom two" for seed in seeds}
            assert (host.lost, host.episodes.void) == (2, 1)

    run(main)


def test_two_of_them_cost_three_boxes_and_nobody_elses_episode() -> None:
    class TwoMines(MinedBox):
        @asynccontextmanager
        async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[ResumableEpisode]:
            episode = Mine(self, task)
            episode.is_deadly = task.seed in (3, 5)
            yield episode

    async def main() -> None:
        async with fleet_of(*(TwoMines(f"box-{n}") for n in range(4)), slots_per_sandbox=8) as host:
            ends = await ends_of(host, "one", "boom", "two", seeds=range(8))
            assert ends == {seed: TWICE if seed in (3, 5) else f"{seed} one boom two" for seed in range(8)}
            assert (host.lost, host.episodes.void) == (3, 2)

    run(main)


@pytest.mark.parametrize("deadly", ["lease", "reset"])
def test_a_world_whose_reset_kills_its_box_is_void_for_two_boxes(deadly: str) -> None:
    async def main() -> None:
        async with fleet_of(*mined(4, deadly=deadly), slots_per_sandbox=16) as host:
            ends = await ends_of(host, "one", seeds=range(16), at_once=False)
            said = f"{KILLED}; the previous worker was lost during the same reset"
            assert ends == {seed: said if seed == DEADLY else f"{seed} one" for seed in range(16)}
            assert (host.lost, host.episodes.void) == (2, 1)

    run(main)


def test_a_step_that_silences_its_box_is_void_for_two_boxes_and_who_could_not_wait_for_it_plays_on() -> None:
    async def main() -> None:
        async with fleet_of(*mined(4, is_silenced=True), slots_per_sandbox=16) as host:
            ends = await ends_of(host, "one", "boom", "two", seeds=range(16))
            assert ends.pop(DEADLY).endswith("; the previous worker was lost during the same step")
            assert ends == {seed: f"{seed} one boom two" for seed in range(16) if seed != DEADLY}
            assert (host.lost, host.episodes.void) == (2, 1)

    run(main)


def test_in_a_box_of_its_own_it_is_void_for_two_boxes_and_waits_for_nobody() -> None:
    async def main() -> None:
        boxes = mined(6, step_s=5)
        async with fleet_of(*boxes, at_once=2) as host:
            began = clock.now()
            async with anyio.create_task_group() as tasks:

                async def interfere() -> None:
                    await anyio.sleep(4)
                    for box in boxes[:2]:
                        box.die(KILLED)

                tasks.start_soon(interfere)
                ends = await ends_of(host, "boom", seeds=range(DEADLY, DEADLY + 2))
            assert ends == {DEADLY: TWICE, DEADLY + 1: f"{DEADLY + 1} boom"}
            assert 9 < clock.now() - began < 9.5
            assert host.lost == 3

    run(main)


def test_boxes_lost_in_different_steps_are_nobodys_fault() -> None:
    async def main() -> None:
        boxes = mined(4, step_s=1)
        async with fleet_of(*boxes, slots_per_sandbox=2) as host, host.lease(Task("Echo-v0", 1)) as episode:
            await episode.reset()
            for turn, box in enumerate(boxes[:3]):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(episode.step, str(turn))
                    await anyio.sleep(turn + 0.5)  # so much is played again in the second box, and more in the third
                    box.die(KILLED)
            assert (await episode.step("end")).observation.text == "1 0 1 2 end"
            assert (host.lost, host.episodes.rebuilt, host.episodes.void) == (3, 3, 0)

    run(main)


def test_slow_steps_keep_the_others_for_a_while_and_nobody_is_blamed_when_some_go_on_beside() -> None:
    async def main() -> None:
        boxes = mined(3, step_s=TURN_S + 5)
        async with fleet_of(*boxes, slots_per_sandbox=4) as host:

            async def interfere() -> None:
                await anyio.sleep(1)
                boxes[0].die(KILLED)
                await anyio.sleep(TURN_S + 2)  # one has its turn, and the others are beside it
                boxes[1].die(KILLED)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(interfere)
                ends = await ends_of(host, "one", seeds=range(4))
            assert ends == {seed: f"{seed} one" for seed in range(4)}
            assert (host.lost, host.episodes.void) == (2, 0)

    run(main)


@pytest.mark.parametrize("culprit", range(8))
def test_among_slow_steps_nobody_but_the_one_that_kills_is_blamed(culprit: int) -> None:
    async def main() -> None:
        seeds = range(DEADLY - culprit, DEADLY - culprit + 8)
        async with fleet_of(*(SlowBox(f"box-{n}") for n in range(4)), slots_per_sandbox=8) as host:
            ends = await ends_of(host, "boom", seeds=seeds)
            assert ends.pop(DEADLY) == TWICE
            assert TWICE not in ends.values()
            assert host.lost in (2, 3)
            assert set(ends.values()) == {f"{seed} boom" for seed in ends}

    run(main)


@pytest.mark.parametrize(
    ("impatient", "ends"), [(0, {1: 0.9, 2: 1.3}), (1, {0: 0.7, 2: 1.1})], ids=["has its turn", "waits for it"]
)
def test_one_that_is_cancelled_while_it_has_its_turn_or_waits_for_it_keeps_nobody_waiting(
    impatient: int, ends: dict[int, float]
) -> None:
    async def main() -> None:
        boxes = mined(9, step_s=0.4)
        async with fleet_of(*boxes, at_once=6, slots_per_sandbox=3) as host:

            async def play(number: int) -> None:
                async with host.lease(Task("Echo-v0", number)) as episode:
                    await episode.reset()
                    with anyio.move_on_after(0.5 if number == impatient else 100):
                        await episode.step("one")
                        played[number] = clock.now() - began

            played: dict[int, float] = {}
            began = clock.now()
            async with anyio.create_task_group() as tasks:
                for number in range(3):
                    tasks.start_soon(play, number)
                    await anyio.sleep(0.02)  # so that each is in the box of its number
                await anyio.sleep(0.22)
                for box in boxes[:3]:  # and has its turn after the one before it
                    box.die(KILLED)
                    await anyio.sleep(0.02)
            assert played == {number: pytest.approx(at, abs=0.1) for number, at in ends.items()}
            assert host.lost == 3

    run(main)


def test_an_episode_from_before_a_restart_is_void_when_its_box_is_lost_before_it_was_heard_of_again() -> None:
    class Doomed(Mine):
        async def reset(self) -> Reset:
            raise LostDuringCallError("a", cause(KILLED))

    @asynccontextmanager
    async def lease() -> AsyncIterator[ResumableEpisode]:
        yield Doomed(MinedBox("a"), Task("Echo-v0", 1))

    @asynccontextmanager
    async def seat() -> AsyncIterator[Lease]:
        yield lease()

    async def main() -> None:
        tally = EpisodeTally()
        async with FleetEpisode(seat, rebuilds=3, tally=tally, goes_on=True) as episode:
            with pytest.raises(SandboxLostError, match=f"a lost: {KILLED}$"):
                await episode.reset()
        assert (tally.rebuilt, tally.void) == (0, 1)

    run(main)


class Asked(Mine):
    """The same world, which can be asked too; a question is answered when the test says so."""

    def __init__(self, box: Box, task: Task) -> None:
        super().__init__(box, task)
        self.answers: list[asyncio.Future[Raw]] = []

    def start_step(self, action: str) -> asyncio.Future[Raw] | None:
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]

    def finish_step(self, answer: asyncio.Future[Raw]) -> Step:
        answer.result()
        raise NotImplementedError


class AskedBox(MinedBox):
    played: Asked

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[ResumableEpisode]:
        self.played = Asked(self, task)
        yield self.played


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_box_that_ends_of_what_was_asked_for_is_the_first_of_the_two(is_cut_off: bool) -> None:
    async def main() -> None:
        first = AskedBox("a")
        async with fleet_of(first, MinedBox("b"), MinedBox("c"), slots_per_sandbox=2) as host:
            async with host.lease(Task("Echo-v0", DEADLY)) as episode:
                await episode.reset()
                answer = episode.start_step("boom")
                assert answer is not None
                if is_cut_off:  # the connection ends before the sandbox has said what became of it
                    first.played.answers[0].set_exception(UnreachableError("connection lost"))
                    with pytest.raises(UnreachableError):
                        episode.finish_step(answer)
                    first.die(KILLED)
                    await anyio.sleep(0.01)
                else:
                    first.die(KILLED)
                    await asyncio.wait([answer])
                    with pytest.raises(SandboxLostError):
                        episode.finish_step(answer)
                with pytest.raises(SandboxLostError, match=f"b lost: {TWICE}"):
                    await episode.step("boom")
            assert (host.lost, host.episodes.void) == (2, 1)

    run(main)
