"""Calls that may have killed their worker are retried alone; those that kill a second worker are void."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxLostError, UnreachableError
from envkit.fleet.ledger import SessionRecord
from envkit.fleet.suspects import FREE_LOSSES, Offenders
from envkit.protocols import Episode
from envkit.restarts import RestartBudget
from envkit.sandbox.pool.node import Capacity
from envkit.types import Cause, CauseKind, Reset, SandboxState, Step, Task
from tests.causes import cause
from tests.echoes import Echo, Worker, fleet_of
from tests.fleet.fleets import FakeSessionStore, ScriptedFleet, run
from tests.fleet.test_rebuild import SplitWorker
from tests.keys import key

DEADLY = 13
"""Seed of the task that kills its worker."""
KILLED = "killed by signal 11"
TWICE = f"{KILLED}; the previous worker was lost during the same step"


class DeadlyEcho(Echo):
    """An environment whose deadly task kills or blocks its worker in the call that the worker names."""

    worker: DeadlyWorker

    def __init__(self, worker: Worker, task: Task) -> None:
        super().__init__(worker, task)
        self.is_deadly = task.seed == DEADLY

    async def reset(self) -> Reset:
        await self.maybe_kill("reset")
        return await super().reset()

    async def step(self, action: str) -> Step:
        await anyio.sleep(self.worker.step_s)
        await self.maybe_kill(action)
        return await super().step(action)

    async def maybe_kill(self, call: str) -> None:
        if self.is_deadly and call == self.worker.deadly:
            if self.worker.is_blocked:
                self.worker.hangs = True
            else:
                self.worker.die(KILLED)
        await self.worker.health()


class DeadlyWorker(Worker):
    """A worker with a deadly call, whose environment takes `step_s` seconds for a step."""

    hangs = False
    playing = 0

    def __init__(self, name: str, *, deadly: str = "boom", step_s: float = 0.0, is_blocked: bool = False) -> None:
        super().__init__(name)
        self.deadly = deadly
        self.step_s = step_s
        self.is_blocked = is_blocked

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[Episode]:
        episode = DeadlyEcho(self, task)
        if self.deadly == "lease":
            await episode.maybe_kill("lease")
        self.playing += 1
        try:
            yield episode
        finally:
            self.playing -= 1

    async def health(self) -> None:
        if self.hangs:
            await anyio.sleep_forever()
        await super().health()

    heartbeat = health


def deadly_workers(
    count: int, *, deadly: str = "boom", step_s: float = 0.0, is_blocked: bool = False
) -> list[DeadlyWorker]:
    names = (f"worker-{number}" for number in range(count))
    return [DeadlyWorker(name, deadly=deadly, step_s=step_s, is_blocked=is_blocked) for name in names]


async def ends_of(host: ScriptedFleet, *actions: str, seeds: range, at_once: bool = True) -> dict[int, str]:
    """Play a task of each seed, with all of their steps at once; return how each ended."""
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


def test_of_32_concurrent_steps_only_the_one_that_kills_two_workers_is_void() -> None:
    async def main() -> None:
        seeds = range(DEADLY - 7, DEADLY + 25)
        async with fleet_of(*deadly_workers(4), slots_per_sandbox=32) as host:
            ends = await ends_of(host, "one", "boom", "two", seeds=seeds)
            assert ends == {seed: TWICE if seed == DEADLY else f"{seed} one boom two" for seed in seeds}
            assert (host.lost, host.episodes.void) == (2, 1)

    run(main)


def test_two_deadly_episodes_cost_three_workers_and_no_other_episode() -> None:
    class TwoDeadly(DeadlyWorker):
        @asynccontextmanager
        async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[Episode]:
            episode = DeadlyEcho(self, task)
            episode.is_deadly = task.seed in (3, 5)
            yield episode

    async def main() -> None:
        async with fleet_of(*(TwoDeadly(f"worker-{n}") for n in range(8)), slots_per_sandbox=8) as host:
            ends = await ends_of(host, "one", "boom", "two", seeds=range(8))
            assert ends == {seed: TWICE if seed in (3, 5) else f"{seed} one boom two" for seed in range(8)}
            assert (host.lost, host.episodes.void) == (3, 2)

    run(main)


@pytest.mark.parametrize("deadly", ["lease", "reset"])
def test_an_episode_whose_reset_kills_two_workers_is_void(deadly: str) -> None:
    async def main() -> None:
        async with fleet_of(*deadly_workers(8, deadly=deadly), slots_per_sandbox=16) as host:
            ends = await ends_of(host, "one", seeds=range(16), at_once=False)
            cause = f"{KILLED}; the previous worker was lost during the same reset"
            assert ends == {seed: cause if seed == DEADLY else f"{seed} one" for seed in range(16)}
            assert (host.lost, host.episodes.void) == (2, 1)

    run(main)


def test_an_episode_whose_step_blocks_two_workers_is_void_and_the_others_continue() -> None:
    async def main() -> None:
        async with fleet_of(*deadly_workers(4, is_blocked=True), slots_per_sandbox=16) as host:
            ends = await ends_of(host, "one", "boom", "two", seeds=range(16))
            assert ends.pop(DEADLY).endswith("; the previous worker was lost during the same step")
            assert ends == {seed: f"{seed} one boom two" for seed in range(16) if seed != DEADLY}
            assert (host.lost, host.episodes.void) == (2, 1)

    run(main)


def test_a_deadly_episode_in_single_episode_workers_is_void_without_waiting() -> None:
    async def main() -> None:
        workers = deadly_workers(6, step_s=5)
        async with fleet_of(*workers, at_once=2) as host:
            began = clock.now()
            async with anyio.create_task_group() as tasks:

                async def interfere() -> None:
                    await anyio.sleep(4)
                    for worker in workers[:2]:
                        worker.die(KILLED)

                tasks.start_soon(interfere)
                ends = await ends_of(host, "boom", seeds=range(DEADLY, DEADLY + 2))
            assert ends == {DEADLY: TWICE, DEADLY + 1: f"{DEADLY + 1} boom"}
            assert 9 < clock.now() - began < 9.5
            assert host.lost == 3

    run(main)


def test_losses_during_different_steps_do_not_make_an_episode_void() -> None:
    async def main() -> None:
        workers = deadly_workers(8, step_s=1)
        async with fleet_of(*workers, slots_per_sandbox=2) as host, host.lease(Task("Echo-v0", 1)) as episode:
            await episode.reset()
            await episode.step("0")
            for turn in range(1, 4):
                playing = next(worker for worker in workers if worker.playing and not worker.died.is_set())
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(episode.step, str(turn))
                    await anyio.sleep(0.5)
                    playing.die(KILLED)
            assert (await episode.step("end")).observation.text == "1 0 1 2 3 end"
            assert (host.lost, host.episodes.rebuilt, host.episodes.void) == (3, 3, 0)

    run(main)


def test_a_resumed_episode_whose_worker_is_lost_before_its_first_answer_is_void() -> None:
    async def main() -> None:
        store, task = FakeSessionStore(), Task("Echo-v0", DEADLY)
        async with fleet_of(*deadly_workers(2, deadly="reset"), session_store=store) as host:
            store.records[key("old")] = SessionRecord(host.pool.views()[0].id, "session", task)
            async with host.lease_as(key("old"), task) as episode:
                with pytest.raises(SandboxLostError, match=f"lost: {KILLED}$"):
                    await episode.reset()
            assert (host.episodes.rebuilt, host.episodes.void) == (0, 1)

    run(main)


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_loss_during_a_split_step_is_the_first_of_two(is_cut_off: bool) -> None:
    async def main() -> None:
        first = SplitWorker("a")
        async with fleet_of(first, DeadlyWorker("b"), DeadlyWorker("c"), slots_per_sandbox=2) as host:
            async with host.lease(Task("Echo-v0", DEADLY)) as episode:
                await episode.reset()
                answer = episode.start_step("boom")
                assert answer is not None
                if is_cut_off:  # the connection ends before the sandbox reports its end
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
                with pytest.raises(SandboxLostError, match=f"lost: {TWICE}"):
                    await episode.step("boom")
            assert (host.lost, host.episodes.void) == (2, 1)

    run(main)


def playing_in(workers: list[DeadlyWorker]) -> DeadlyWorker:
    (playing,) = (worker for worker in workers if worker.playing and not worker.died.is_set())
    return playing


async def lose_during(step: Callable[[str], Coroutine[Any, Any, Step]], action: str, *victims: DeadlyWorker) -> None:
    """Play a step of a second, and kill workers in the middle of it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(step, action)
        await anyio.sleep(0.5)
        for worker in victims:
            worker.die(KILLED)


def test_an_episode_returns_from_the_extra_worker_of_a_suspect_call_which_then_ends() -> None:
    async def main() -> None:
        workers = deadly_workers(3, step_s=1)
        async with fleet_of(*workers, slots_per_sandbox=2) as host, host.lease(Task("Echo-v0", 1)) as episode:
            await episode.reset()
            await lose_during(episode.step, "one", workers[0])
            await anyio.sleep(1)
            live = [view.id[:13] for view in host.pool.views() if view.state is SandboxState.LEASED]
            assert live == [":envs-shared-"]
            assert (await episode.step("two")).observation.text == "1 one two"
            assert (host.lost, host.episodes.rebuilt) == (1, 1)

    run(main)


def test_an_isolated_episode_plays_on_alone_after_a_loss() -> None:
    async def main() -> None:
        offenders = Offenders(RestartBudget(), max_isolated=1)
        for _ in range(FREE_LOSSES):
            offenders.record("", "Echo-v0", cause(KILLED))
        workers = deadly_workers(4, step_s=1)
        fleet = fleet_of(*workers, slots_per_sandbox=2, offenders=offenders)
        async with fleet, fleet.lease(Task("Echo-v0", 1)) as episode:
            await episode.reset()
            await lose_during(episode.step, "one", playing_in(workers))
            await episode.step("two")
            assert (workers[0].playing, playing_in(workers)) == (0, workers[2])
            playing_in(workers).die(KILLED)
            await anyio.sleep(0.5)
            await episode.step("three")
            assert (workers[0].playing, playing_in(workers)) == (0, workers[3])

    run(main)


def test_without_capacity_for_an_extra_worker_a_suspect_call_is_repeated_in_a_shared_one_without_guilt() -> None:
    async def main() -> None:
        workers = deadly_workers(3, step_s=1)
        async with fleet_of(*workers, at_once=3, slots_per_sandbox=2, wait_timeout_s=5) as host:
            host.pool.node.capacity = Capacity(sandboxes=1)
            async with host.lease(Task("Echo-v0", 1)) as episode:
                await episode.reset()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(episode.step, "one")
                    await anyio.sleep(0.5)
                    playing_in(workers).die(KILLED)
                    await anyio.sleep(5.6)  # it is repeated after 5 s
                    playing_in(workers).die(KILLED)
                assert (await episode.step("two")).observation.text == "1 one two"
            assert (host.lost, host.episodes.rebuilt, host.episodes.void) == (2, 2, 0)

    run(main)


def test_an_episode_is_void_when_two_of_its_workers_hang_even_in_different_steps() -> None:
    async def main() -> None:
        workers = deadly_workers(5, step_s=1)
        async with fleet_of(*workers, slots_per_sandbox=2) as host, host.lease(Task("Echo-v0", 1)) as episode:
            await episode.reset()
            await hang_during(episode.step, "one", workers)
            assert (await episode.step("two")).observation.text == "1 one two"
            with pytest.raises(SandboxLostError, match="did not answer for 4 s"):
                await hang_during(episode.step, "three", workers)
            assert (host.lost, host.episodes.void) == (2, 1)

    run(main)


async def hang_during(
    step: Callable[[str], Coroutine[Any, Any, Step]], action: str, workers: list[DeadlyWorker]
) -> None:
    async with clock.background_tasks() as tasks:

        async def hang() -> None:
            await anyio.sleep(0.5)
            playing_in(workers).hangs = True

        tasks.start_soon(hang)
        await step(action)


def test_attributed_losses_neither_use_up_the_restart_budget_nor_wait_for_it() -> None:
    async def main() -> None:
        workers = deadly_workers(9)
        budget = RestartBudget(restarts=1, window_s=100)
        async with fleet_of(*workers, slots_per_sandbox=2, restarts=budget) as host:

            async def poison() -> None:
                async with host.lease(Task("Echo-v0", DEADLY)) as episode:
                    await episode.reset()
                    with pytest.raises(SandboxLostError, match=TWICE):
                        await episode.step("boom")

            await poison()
            await anyio.sleep(1)
            next(worker for worker in workers[1:] if not worker.died.is_set()).die(KILLED)  # uses up the budget
            await anyio.sleep(1)
            await poison()
            async with host.lease(Task("Echo-v0", 1)) as episode:
                await episode.reset()
            assert clock.now() < 4

    run(main)


class Answering(Worker):
    """A worker that takes a second for each answer."""

    async def answer(self) -> None:
        await anyio.sleep(1)
        await super().answer()


@pytest.mark.parametrize("kind", [CauseKind.NODE_LOST, CauseKind.STOPPED])
@pytest.mark.parametrize("is_replayable", [True, False])
def test_lost_nodes_and_drains_are_attributed_to_no_episode(kind: CauseKind, is_replayable: bool) -> None:
    async def main() -> None:
        offenders = Offenders(RestartBudget(0), max_isolated=2)
        for _ in range(FREE_LOSSES - 1):
            offenders.record("", "Echo-v0", cause(KILLED))  # one more, and episodes are rejected
        workers = [Answering(f"worker-{number}") for number in range(8)]

        async def lose() -> None:
            for worker in workers[: 5 if is_replayable else 1]:
                await anyio.sleep(2.5)
                (view,) = host.pool.views(tenant="")[-1:]
                assert view.backend_id == worker.id
                if kind is CauseKind.STOPPED:
                    await host.pool.stop(view.id)
                else:
                    host.pool.lose(view.id, Cause(kind, "node b is lost"))

        async with fleet_of(*workers, is_replayable=is_replayable, offenders=offenders, extra=1) as host:
            async with host.lease_as(key("s"), Task("Echo-v0", 1)) as episode, anyio.create_task_group() as tasks:
                await episode.reset()
                tasks.start_soon(lose)
                if is_replayable:
                    for _ in range(7):
                        step = await episode.step("x")
                    assert step.observation.text == "1" + 7 * " x"
                else:
                    for _ in range(2):
                        await episode.step("x")
                    with pytest.raises(SandboxLostError):
                        await episode.step("x")
            assert (workers[4].died.is_set(), host.episodes.void) == (is_replayable, not is_replayable)
            assert not offenders.is_isolated("", "Echo-v0")

    run(main)
