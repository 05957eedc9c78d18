"""Episodes that lose their worker are rebuilt if their environment can be replayed, and otherwise void."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from msgspec import Raw

from envkit.errors import DeadlineError, EnvError, EnvkitError, EnvRejectedError, SandboxLostError
from envkit.fleet.suspects import FREE_LOSSES, Offenders
from envkit.protocols import Episode
from envkit.restarts import RestartBudget
from envkit.types import Observation, Reset, Step, Task
from tests.causes import cause
from tests.echoes import TASK, Echo, Worker, fleet_of
from tests.fleet.fleets import run


def test_an_episode_continues_in_another_worker() -> None:
    async def main() -> None:
        async with fleet_of(Worker("a", dies_after=3), Worker("b")) as fleet, fleet.lease(TASK) as episode:
            assert await episode.reset() == Reset(Observation("3"), {})
            steps = [await episode.step(word) for word in ("one", "nothing", "two", "three")]
        assert [step.observation.text for step in steps] == [
            "3 one",
            "3 one nothing",
            "3 one nothing two",
            "3 one nothing two three",
        ]
        assert [step.info for step in steps] == [
            {"worker": "a"},
            {"worker": "a"},
            {"worker": "b", "rebuilt": "killed by signal 9"},
            {"worker": "b"},
        ]
        assert (fleet.lost, fleet.episodes.rebuilt, fleet.episodes.void) == (1, 1, 0)

    run(main)


def test_an_episode_whose_worker_dies_during_the_reset_is_rebuilt() -> None:
    async def main() -> None:
        async with fleet_of(Worker("a", dies_after=0), Worker("b")) as fleet, fleet.lease(TASK) as episode:
            assert await episode.reset() == Reset(Observation("3"), {"rebuilt": "killed by signal 9"})
            assert (await episode.step("go")).info == {"worker": "b"}

    run(main)


def test_the_number_of_rebuilds_of_an_episode_is_limited() -> None:
    async def main(deaths: int) -> None:
        workers = [
            Worker("first", dies_after=4),
            *(Worker(f"bad-{n}", dies_after=2) for n in range(deaths)),
            Worker("good"),
        ]
        async with fleet_of(*workers) as fleet, fleet.lease(TASK) as episode:
            await episode.reset()
            for word in "abc":
                await episode.step(word)
            assert (await episode.step("d")).observation.text == "3 a b c d"

    run(lambda: main(2))
    with pytest.raises(SandboxLostError, match="lost: killed by signal 9"):
        run(lambda: main(3))


def test_an_environment_whose_replay_differs_makes_the_episode_void() -> None:
    async def main() -> None:
        async with fleet_of(Worker("a", dies_after=3), Worker("b", accent="!")) as fleet, fleet.lease(TASK) as episode:
            await episode.reset()
            await episode.step("one")
            await episode.step("two")
            for _ in range(2):
                with pytest.raises(SandboxLostError, match="the replay differed in turn 1") as raised:
                    await episode.step("three")
                assert raised.value.sandbox_id == fleet.pool.views()[0].id
            assert (fleet.episodes.rebuilt, fleet.episodes.void) == (0, 1)

    run(main)


def test_an_episode_that_cannot_be_rebuilt_is_void_at_once() -> None:
    async def main() -> None:
        fleet = fleet_of(Worker("a", dies_after=1), Worker("b"), is_replayable=False)
        async with fleet, fleet.lease(TASK) as episode:
            await episode.reset()
            with pytest.raises(SandboxLostError, match="lost: killed by signal 9"):
                await episode.step("one")
            assert fleet.episodes.void == 1

    run(main)


@pytest.mark.parametrize("seconds", [0.05, 0.115, 0.125])
def test_a_cancelled_rebuild_makes_the_episode_void(seconds: float) -> None:
    async def main() -> None:
        first = Worker("a")
        async with fleet_of(first, Worker("b")) as fleet, fleet.lease(TASK) as episode:
            for call in (episode.reset(), episode.step("one"), episode.step("two")):
                await call
            first.die("killed by signal 9")
            with anyio.move_on_after(seconds):
                await episode.step("three")
            with pytest.raises(SandboxLostError, match="killed by signal 9; rebuild interrupted"):
                await episode.step("three")
            assert (fleet.episodes.rebuilt, fleet.episodes.void) == (0, 1)

    run(main)


@pytest.mark.parametrize("error", [EnvError("Echo-v0", "boom"), DeadlineError("no answer within 60 s")])
def test_an_error_of_the_environment_during_a_rebuild_makes_the_episode_void(error: EnvkitError) -> None:
    class Bad(Worker):
        async def answer(self) -> None:
            if self.calls:
                raise error
            await super().answer()

    async def main() -> None:
        async with fleet_of(Worker("a", dies_after=2), Bad("b")) as fleet, fleet.lease(TASK) as episode:
            await episode.reset()
            await episode.step("one")
            for _ in range(2):
                with pytest.raises(SandboxLostError, match=f"lost: killed by signal 9; rebuild failed: {error}"):
                    await episode.step("two")
            assert (fleet.episodes.rebuilt, fleet.episodes.void) == (0, 1)

    run(main)


def test_each_of_300_episodes_in_dying_workers_is_finished_rebuilt_or_void() -> None:
    async def main() -> None:
        rng = random.Random(5)
        fates = dict.fromkeys(("finished", "rebuilt", "void"), 0)
        workers = [Worker(f"worker-{n}", dies_after=rng.randint(20, 400)) for n in range(300)]

        async def play(number: int) -> None:
            task = Task("Echo-v0" if number % 4 else "Odd-v0", number)
            was_rebuilt = False
            try:
                async with fleet.lease(task) as episode:
                    await episode.reset()
                    for turn in range(8):
                        step = await episode.step(str(turn))
                        was_rebuilt |= "rebuilt" in step.info
            except SandboxLostError:
                fates["void"] += 1
            else:
                assert step.terminated
                assert step.observation.text == " ".join([str(number), *map(str, range(8))])
                fates["rebuilt" if was_rebuilt else "finished"] += 1

        async with fleet_of(*workers, at_once=8, slots_per_sandbox=4) as fleet:
            async with anyio.create_task_group() as tasks:
                for number in range(300):
                    tasks.start_soon(play, number)
            assert sum(fates.values()) == 300
            assert fates["void"] == fleet.episodes.void > 0
            assert 0 < fates["rebuilt"] <= fleet.episodes.rebuilt
            assert fleet.lost > 5
        assert all(worker.died.is_set() for worker in workers if worker.calls)

    run(main)


def test_isolated_episodes_play_alone_in_extra_workers_that_end_with_them() -> None:
    async def main() -> None:
        played_in: list[object] = []
        offenders = Offenders(RestartBudget(), max_isolated=2)
        for _ in range(FREE_LOSSES):
            offenders.record("", TASK.env_id, cause("killed by signal 9"))

        async def play() -> None:
            async with fleet.lease(TASK) as episode:
                await episode.reset()
                played_in.append((await episode.step("go")).info["worker"])
                await anyio.sleep(1)

        workers = [Worker(name) for name in ("shared", *"abcdef")]
        none = RestartBudget(restarts=0)
        async with fleet_of(*workers, slots_per_sandbox=9, restarts=none, offenders=offenders, extra=2) as fleet:
            assert fleet.partition_of(TASK.env_id, "") == ("environments in their own sandboxes", 2)
            assert fleet.partition_of("Odd-v0", "") == ("environments", 9)
            for _ in range(3):
                async with anyio.create_task_group() as tasks:
                    for _ in range(2):
                        tasks.start_soon(play)
                await anyio.sleep(1)
            assert sorted(map(str, played_in)) == list("abcdef")
            assert [worker.died.is_set() for worker in workers] == [False] + 6 * [True]
            assert (fleet.lost, fleet.capacity) == (0, 9)
            assert not fleet.pool.counts().alerts  # an end without a loss does not count against the restart budget

    run(main)


def test_losses_during_grades_void_their_episodes_and_are_not_charged_to_the_fleet() -> None:
    async def main() -> None:
        offenders = Offenders(RestartBudget(restarts=0))
        workers = [Worker(name, dies_after=2) for name in "abcd"]
        async with fleet_of(*workers, restarts=RestartBudget(restarts=1), offenders=offenders) as fleet:
            for _ in range(3):  # more losses than the budget of the fleet, which they do not use up
                async with fleet.lease(TASK) as episode:
                    await episode.reset()
                    await episode.step("one")
                    with pytest.raises(SandboxLostError, match="killed by signal 9"):
                        await episode.grade()
            assert (fleet.episodes.rebuilt, fleet.episodes.void) == (0, 3)
            with pytest.raises(EnvRejectedError):
                offenders.is_isolated("", TASK.env_id)

    run(main)


class SplitEcho(Echo):
    """An echo with split steps, which are answered when the test sets their future."""

    def __init__(self, worker: Worker, task: Task) -> None:
        super().__init__(worker, task)
        self.answers: list[asyncio.Future[Raw]] = []
        self.action = ""

    def start_step(self, action: str) -> asyncio.Future[Raw] | None:
        self.action = action
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]

    def finish_step(self, answer: asyncio.Future[Raw]) -> Step:
        answer.result()
        self.words.append(self.action)
        return Step(Observation(" ".join(self.words)), float(len(self.words)), False, False, {"worker": self.worker.id})


class SplitWorker(Worker):
    """A worker whose episodes support split steps."""

    played: SplitEcho

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[Episode]:
        self._check()
        self.played = SplitEcho(self, task)
        yield self.played


def test_a_split_step_whose_worker_dies_is_retried_in_the_next_one() -> None:
    async def main() -> None:
        first, second = SplitWorker("a"), SplitWorker("b")
        async with fleet_of(first, second) as fleet, fleet.lease(TASK) as episode:
            await episode.reset()
            one = episode.start_step("one")
            assert one is not None
            first.played.answers[0].set_result(Raw(b"{}"))
            assert episode.finish_step(one).observation.text == "3 one"

            two = episode.start_step("two")
            assert two is not None
            first.die("killed by signal 9")
            with anyio.fail_after(1):
                await asyncio.wait([two])
            with pytest.raises(SandboxLostError, match="killed by signal 9"):
                episode.finish_step(two)
            step = await episode.step("two")
            assert (step.observation.text, step.info) == ("3 one two", {"worker": "b", "rebuilt": "killed by signal 9"})

            three = episode.start_step("three")
            assert three is not None
            second.played.answers[0].set_result(Raw(b"{}"))
            assert episode.finish_step(three).observation.text == "3 one two three"
        assert (fleet.episodes.rebuilt, fleet.episodes.void) == (1, 0)

    run(main)
