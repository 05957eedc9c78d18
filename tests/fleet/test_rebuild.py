"""Episodes that lose their box: rebuilt where that can be, void where it cannot, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from msgspec import Raw

from envkit.errors import DeadlineError, EnvError, EnvkitError, SandboxLostError
from envkit.fleet import FleetHost, RoutedHosts
from envkit.protocols import ResumableEpisode
from envkit.restarts import RestartBudget
from envkit.types import Observation, Reset, Step, Task
from tests.echoes import TASK, Box, Echo, connect, fleet_of
from tests.fleet.fleets import run


def test_an_episode_goes_on_in_another_box_as_if_nothing_had_been() -> None:
    async def main() -> None:
        async with fleet_of(Box("a", dies_after=3), Box("b")) as fleet, fleet.lease(TASK) as episode:
            assert await episode.reset() == Reset(Observation("3"), {})
            steps = [await episode.step(word) for word in ("one", "nothing", "two", "three")]
        assert [step.observation.text for step in steps] == [
            "3 one",
            "3 one nothing",
            "3 one nothing two",
            "3 one nothing two three",
        ]
        assert [step.info for step in steps] == [
            {"box": "a"},
            {"box": "a"},
            {"box": "b", "rebuilt": "killed by signal 9"},
            {"box": "b"},
        ]
        assert (fleet.lost, fleet.episodes.rebuilt, fleet.episodes.void) == (1, 1, 0)

    run(main)


def test_a_box_that_dies_during_the_reset_is_replaced_too() -> None:
    async def main() -> None:
        async with fleet_of(Box("a", dies_after=0), Box("b")) as fleet, fleet.lease(TASK) as episode:
            assert await episode.reset() == Reset(Observation("3"), {"rebuilt": "killed by signal 9"})
            assert (await episode.step("go")).info == {"box": "b"}

    run(main)


def test_an_episode_whose_box_dies_as_it_takes_its_place_there_is_given_another_one() -> None:
    async def main() -> None:
        async with fleet_of(Box("a", is_dying=True), Box("b")) as host:
            async with host.lease(TASK) as episode:
                assert (await episode.reset()).info == {"rebuilt": "killed by signal 9"}
                await episode.step("x")
            assert (host.episodes.rebuilt, host.episodes.void) == (1, 0)

    run(main)


def test_an_episode_that_cannot_be_rebuilt_and_whose_box_dies_as_it_takes_its_place_there_is_void() -> None:
    async def main() -> None:
        async with fleet_of(Box("a", is_dying=True), Box("b"), is_replayable=False) as host:
            with pytest.raises(SandboxLostError, match="a lost: killed by signal 9"):
                await host.lease(TASK).__aenter__()
            assert (host.episodes.rebuilt, host.episodes.void) == (0, 1)

    run(main)


def test_an_episode_whose_box_died_between_two_steps_is_rebuilt_with_the_next() -> None:
    async def main() -> None:
        first = Box("a")
        async with fleet_of(first, Box("b")) as fleet, fleet.lease(TASK) as episode:
            await episode.reset()
            await episode.step("one")
            first.die("out of memory")
            await anyio.sleep(60)
            step = await episode.step("two")
            assert (step.observation.text, step.info["rebuilt"]) == ("3 one two", "out of memory")

    run(main)


def test_boxes_may_die_while_an_episode_is_rebuilt_but_not_for_ever() -> None:
    async def main(deaths: int) -> None:
        boxes = [Box("first", dies_after=4), *(Box(f"bad-{n}", dies_after=2) for n in range(deaths)), Box("good")]
        async with fleet_of(*boxes) as fleet, fleet.lease(TASK) as episode:
            await episode.reset()
            for word in "abc":
                await episode.step(word)
            assert (await episode.step("d")).observation.text == "3 a b c d"

    run(lambda: main(2))
    with pytest.raises(SandboxLostError, match="sandbox bad-2 lost: killed by signal 9"):
        run(lambda: main(3))


def test_a_world_that_answers_otherwise_when_rebuilt_makes_the_episode_void_for_good() -> None:
    async def main() -> None:
        async with fleet_of(Box("a", dies_after=3), Box("b", accent="!")) as fleet, fleet.lease(TASK) as episode:
            await episode.reset()
            await episode.step("one")
            await episode.step("two")
            for _ in range(2):
                with pytest.raises(SandboxLostError, match="the replay differed in turn 1") as raised:
                    await episode.step("three")
                assert raised.value.sandbox_id == "a"
            assert (fleet.episodes.rebuilt, fleet.episodes.void) == (0, 1)

    run(main)


def test_a_world_that_cannot_be_rebuilt_is_void_at_once() -> None:
    async def main() -> None:
        fleet = fleet_of(Box("a", dies_after=1), Box("b"), is_replayable=False)
        async with fleet, fleet.lease(TASK) as episode:
            await episode.reset()
            with pytest.raises(SandboxLostError, match="sandbox a lost: killed by signal 9"):
                await episode.step("one")
            assert fleet.episodes.void == 1

    run(main)


def test_who_gives_up_while_an_episode_is_rebuilt_leaves_no_place_taken() -> None:
    async def main() -> None:
        first, second = Box("a"), Box("b")
        async with fleet_of(first, second) as fleet:
            async with fleet.lease(TASK) as episode:
                await episode.reset()
                first.die("killed by signal 9")
                with anyio.move_on_after(0.05):  # the replacement comes after 0.1 s
                    await episode.step("one")
            async with fleet.lease(TASK) as episode:
                await episode.reset()
                assert (await episode.step("two")).info == {"box": "b"}

    run(main)


@pytest.mark.parametrize("seconds", [0.05, 0.115, 0.125])
def test_a_rebuild_that_is_interrupted_makes_the_episode_void(seconds: float) -> None:
    async def main() -> None:
        first = Box("a")
        async with fleet_of(first, Box("b")) as fleet, fleet.lease(TASK) as episode:
            for call in (episode.reset(), episode.step("one"), episode.step("two")):
                await call
            first.die("killed by signal 9")
            with anyio.move_on_after(seconds):
                await episode.step("three")
            with pytest.raises(SandboxLostError, match="killed by signal 9; and its rebuild was interrupted"):
                await episode.step("three")
            assert (fleet.episodes.rebuilt, fleet.episodes.void) == (0, 1)

    run(main)


@pytest.mark.parametrize("error", [EnvError("Echo-v0", "boom"), DeadlineError("no answer within 60 s")])
def test_an_error_of_the_world_while_it_is_rebuilt_makes_the_episode_void(error: EnvkitError) -> None:
    class Bad(Box):
        async def answer(self) -> None:
            if self.calls:
                raise error
            await super().answer()

    async def main() -> None:
        async with fleet_of(Box("a", dies_after=2), Bad("b")) as fleet, fleet.lease(TASK) as episode:
            await episode.reset()
            await episode.step("one")
            for _ in range(2):
                with pytest.raises(SandboxLostError, match=f"a lost: killed by signal 9; and {error}"):
                    await episode.step("two")
            assert (fleet.episodes.rebuilt, fleet.episodes.void) == (0, 1)

    run(main)


def test_of_a_thousand_episodes_in_dying_boxes_each_is_finished_rebuilt_or_void() -> None:
    async def main() -> None:
        rng = random.Random(5)
        fates = dict.fromkeys(("finished", "rebuilt", "void"), 0)
        boxes = [Box(f"box-{n}", dies_after=rng.randint(20, 400)) for n in range(1000)]

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

        async with fleet_of(*boxes, at_once=8, slots_per_sandbox=4) as fleet:
            async with anyio.create_task_group() as tasks:
                for number in range(1000):
                    tasks.start_soon(play, number)
            assert sum(fates.values()) == 1000
            assert fates["void"] == fleet.episodes.void > 0
            assert 0 < fates["rebuilt"] <= fleet.episodes.rebuilt
            assert fleet.lost > 10
        assert all(box.died.is_set() for box in boxes if box.calls)

    run(main)


def test_a_fleet_that_is_left_with_an_episode_in_it_says_so_to_who_plays_on() -> None:
    async def main() -> None:
        async with fleet_of(Box("a")) as fleet:
            lease = fleet.lease(TASK)
            episode = await lease.__aenter__()
            await episode.reset()
        with pytest.raises(SandboxLostError, match="the fleet was closed"):
            await episode.step("one")
        await lease.__aexit__(None, None, None)

    run(main)


def test_a_box_that_has_served_its_episodes_makes_room_for_a_new_one_without_counting_as_lost() -> None:
    async def main() -> None:
        queue = [Box(f"box-{n}") for n in range(9)]

        async def start() -> Box:
            return queue.pop(0)

        async def play() -> None:
            async with fleet.lease(TASK) as episode:
                await episode.reset()
                played_in.append((await episode.step("go")).info["box"])

        played_in: list[object] = []
        none = RestartBudget(restarts=0)
        async with FleetHost(
            start, connect, workers=2, slots_per_sandbox=1, restarts=none, episodes_per_sandbox=1
        ) as fleet:
            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(play)
            assert sorted(map(str, played_in)) == [f"box-{n}" for n in range(6)]
            assert (fleet.lost, fleet.restarts, fleet.capacity) == (0, 0, 2)

    run(main)


def test_worlds_that_share_a_box_and_worlds_that_do_not_are_told_apart() -> None:
    async def main() -> None:
        async with fleet_of(Box("shared"), slots_per_sandbox=9) as shared, fleet_of(Box("own")) as own:
            homes = RoutedHosts(shared, own, lambda env_id: env_id != "Heavy-v0")
            assert homes.capacity == 10
            for env_id, box in (("Light-v0", "shared"), ("Heavy-v0", "own")):
                async with homes.lease(Task(env_id, 1)) as episode:
                    await episode.reset()
                    assert (await episode.step("go")).info == {"box": box}

    run(main)


class Asked(Echo):
    """The same world, which can be asked too; a question is answered when the test says so."""

    def __init__(self, box: Box, task: Task) -> None:
        super().__init__(box, task)
        self.answers: list[asyncio.Future[Raw]] = []
        self.action = ""

    def start_step(self, action: str) -> asyncio.Future[Raw] | None:
        self.action = action
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]

    def finish_step(self, answer: asyncio.Future[Raw]) -> Step:
        answer.result()
        self.said.append(self.action)
        return Step(Observation(" ".join(self.said)), float(len(self.said)), False, False, {"box": self.box.id})


class AskedBox(Box):
    """A box whose worlds can be asked."""

    played: Asked

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[ResumableEpisode]:
        self._check()
        self.played = Asked(self, task)
        yield self.played


def test_a_box_that_ends_before_it_has_answered_costs_no_step() -> None:
    async def main() -> None:
        first, second = AskedBox("a"), AskedBox("b")
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
            assert (step.observation.text, step.info) == ("3 one two", {"box": "b", "rebuilt": "killed by signal 9"})

            three = episode.start_step("three")
            assert three is not None
            second.played.answers[0].set_result(Raw(b"{}"))
            assert episode.finish_step(three).observation.text == "3 one two three"
        assert (fleet.episodes.rebuilt, fleet.episodes.void) == (1, 0)

    run(main)


def test_a_box_that_is_gone_is_not_asked() -> None:
    async def main() -> None:
        box = AskedBox("a")
        async with fleet_of(box, Box("b")) as fleet, fleet.lease(TASK) as episode:
            await episode.reset()
            box.die("killed by signal 9")
            await anyio.sleep(0.01)
            assert episode.start_step("one") is None
            assert box.played.answers == []
            assert (await episode.step("one")).info == {"box": "b", "rebuilt": "killed by signal 9"}
            assert episode.start_step("two") is None  # this one cannot be asked

    run(main)
