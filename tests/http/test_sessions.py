"""Sessions on virtual time: repeats, order, expiry, deadlines, and that no lease is kept too long."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.errors import (
    CapacityError,
    DeadlineError,
    EnvError,
    EnvkitError,
    OptionError,
    SandboxLostError,
    SessionBrokenError,
    SessionConflictError,
    SessionNotFoundError,
    StepOrderError,
    UnknownEnvError,
)
from envkit.http.session import Opened, Played, SessionState
from envkit.http.sessions import SessionTable
from envkit.protocols import Episode
from envkit.types import Observation, Reset, Step, Task
from tests.http.worlds import Lender, slots

COUNT = Task("Count-v0", 7)
SLEEPER = Task("Sleeper-v0", 0)

Play = Callable[[SessionTable, Lender], Awaitable[None]]


def play(main: Play, *, capacity: int = 4, ttl_s: float = 600, step_timeout_s: float = 60) -> Lender:
    """Run `main` with a table on virtual time; afterwards no lease may be open."""

    async def run() -> Lender:
        lender = Lender(slots(capacity))
        async with SessionTable(lender, ttl_s=ttl_s, step_timeout_s=step_timeout_s) as table:
            await main(table, lender)
        assert lender.open == 0
        return lender

    return clock.run(run, virtual=True)


async def settle() -> None:
    """Let everything run that is ready, without time moving."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


def test_a_session_starts_and_each_answer_names_its_turn() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        turn, start = await table.create("a", COUNT)
        assert (turn, start.observation.text, start.observation.legal_moves) == (0, "seed 7", ("on", "back"))
        assert [await table.step("a", turn, action) for turn, action in enumerate("xy")] == [
            Played(1, Step(Observation("1 x", ("on", "back")), 0.5, False, False, {"legal_moves": ["on", "back"]})),
            Played(2, Step(Observation("2 y", ("on", "back")), 0.5, False, False, {"legal_moves": ["on", "back"]})),
        ]

    play(main)


def test_creating_again_gives_the_same_start_and_the_turn_of_now() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        first = await table.create("a", COUNT)
        assert await table.create("a", Task("Count-v0", 7)) == first
        await table.step("a", 0, "x")
        assert await table.create("a", COUNT) == Opened(1, first.start)
        assert lender.open == 1

    play(main)


def test_an_id_in_use_is_refused_to_another_task() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", COUNT)
        with pytest.raises(SessionConflictError, match="session a plays another task"):
            await table.create("a", Task("Count-v0", 8))

    play(main)


def test_the_same_step_twice_moves_the_world_once() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", COUNT)
        first = await table.step("a", 0, "x")
        assert await table.step("a", 0, "x") == first
        assert (await table.step("a", 1, "x")).step.observation.text == "2 x"

    play(main)


def test_a_step_out_of_turn_or_with_another_action_is_refused_and_changes_nothing() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", COUNT)
        await table.step("a", 0, "x")
        with pytest.raises(SessionConflictError, match="turn 0 was played with another action"):
            await table.step("a", 0, "y")
        for turn in (2, 9):
            with pytest.raises(StepOrderError, match=f"expected turn 1, got {turn}"):
                await table.step("a", turn, "x")
        assert (await table.step("a", 1, "x")).step.observation.text == "2 x"
        with pytest.raises(StepOrderError, match="expected turn 2, got 0"):
            await table.step("a", 0, "x")

    play(main)


def test_a_repeat_that_comes_while_the_step_is_played_waits_for_its_answer() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", SLEEPER)
        answers: list[tuple[float, Played]] = []

        async def step() -> None:
            answers.append((clock.now(), await table.step("a", 0, "sleep 10")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step)
            await anyio.sleep(4)
            tasks.start_soon(step)
            await settle()
            with pytest.raises(SessionConflictError):
                await table.step("a", 0, "sleep 1")
            with pytest.raises(StepOrderError):
                await table.step("a", 1, "sleep 1")
        assert clock.now() == 10
        assert [answer.step.observation.text for _, answer in answers] == ["1 slept", "1 slept"]

    play(main)


def test_a_step_that_is_cancelled_in_the_world_breaks_its_session() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", SLEEPER)
        with anyio.move_on_after(3):
            await table.step("a", 0, "sleep 10")
        assert table.get("a").state is SessionState.BROKEN
        for turn, action in ((0, "sleep 10"), (0, "sleep 1"), (1, "sleep 1")):
            with pytest.raises(SessionBrokenError, match=r"^session a: cancelled in turn 0$"):
                await table.step("a", turn, action)
        await settle()
        assert (lender.open, lender.void) == (0, 1)

    play(main)


def test_a_waiter_learns_that_the_step_it_waits_for_was_cancelled() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", SLEEPER)
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()

            async def first() -> None:
                with scope:
                    await table.step("a", 0, "sleep 10")

            tasks.start_soon(first)
            await settle()

            async def second() -> None:
                with pytest.raises(SessionBrokenError):
                    await table.step("a", 0, "sleep 10")

            tasks.start_soon(second)
            await settle()
            scope.cancel()

    play(main)


def test_a_step_past_its_deadline_is_cancelled_and_breaks_the_session() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", SLEEPER)
        for _ in range(2):  # a repeat is told the same
            with pytest.raises(DeadlineError, match="longer than 60 s"):
                await table.step("a", 0, "sleep 3600")
            assert clock.now() == 60
        with pytest.raises(SessionBrokenError, match="broke at turn 0: the step took longer than 60 s"):
            await table.step("a", 1, "sleep 1")
        await settle()
        assert (lender.open, lender.void) == (0, 1)

    play(main)


def test_a_step_just_within_its_deadline_is_answered() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", SLEEPER)
        assert (await table.step("a", 0, "sleep 59")).turn == 1

    play(main)


def test_what_the_world_raises_is_the_answer_also_when_repeated_and_breaks_the_session() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", COUNT)
        for _ in range(2):
            with pytest.raises(EnvError, match="Count-v0 raised ValueError: boom"):
                await table.step("a", 0, "raise")
        with pytest.raises(SessionBrokenError, match="boom"):
            await table.step("a", 0, "x")
        await settle()
        assert (lender.open, lender.void, table.leased) == (0, 1, 0)

    play(main)


def test_an_episode_that_ends_gives_its_place_back_and_keeps_its_last_answer() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", Task("Count-v0", 7, {"end": 1}))
        last = await table.step("a", 0, "x")
        assert last.step.terminated
        await settle()
        assert (lender.open, lender.void, table.leased) == (0, 0, 0)
        assert await table.step("a", 0, "x") == last
        with pytest.raises(StepOrderError, match="after the end of the episode"):
            await table.step("a", 1, "x")
        await table.create("b", COUNT)

    play(main, capacity=1)


def test_a_full_host_says_so_at_once_and_has_room_again_after_a_delete() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", COUNT)
        with pytest.raises(CapacityError, match="all 1 places are taken"):
            await table.create("b", COUNT)
        assert clock.now() == 0
        await table.delete("a")
        await table.create("b", COUNT)

    play(main, capacity=1)


def test_deleting_is_safe_to_repeat_and_ends_a_session_in_any_state() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.delete("never made")
        await table.create("ready", COUNT)
        await table.create("stepping", SLEEPER)

        async def refused(call: Awaitable[object], error: type[EnvkitError]) -> None:
            with pytest.raises(error):
                await call

        async with anyio.create_task_group() as tasks:
            opening = table.create("opening", Task("Sleeper-v0", 0, {"reset_s": 50}))
            tasks.start_soon(refused, opening, SessionNotFoundError)
            tasks.start_soon(refused, table.step("stepping", 0, "sleep 50"), SessionNotFoundError)
            await settle()
            for id in ("ready", "stepping", "opening"):
                await table.delete(id)
                await table.delete(id)
                with pytest.raises(SessionNotFoundError, match=f"no session {id}"):
                    await table.step(id, 0, "x")
        assert (clock.now(), lender.open, table.leased, table.views()) == (0, 0, 0, [])

    play(main)


def test_a_session_that_nobody_uses_expires() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", COUNT)
        await anyio.sleep(599)
        await table.step("a", 0, "x")
        await anyio.sleep(599)
        assert table.get("a").idle_s == 599  # looking is not using
        assert lender.open == 1
        await anyio.sleep(2)
        with pytest.raises(SessionNotFoundError, match="has expired"):
            await table.step("a", 1, "x")
        assert lender.open == 0

    play(main)


def test_a_session_does_not_expire_while_it_plays_a_step_or_is_kept() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", Task("Sleeper-v0", 0, {"reset_s": 9}))
        await anyio.sleep(8)
        assert (await table.step("a", 0, "sleep 30")).turn == 1
        await anyio.sleep(8)
        assert (await table.step("a", 1, "sleep 0")).turn == 2
        names = {"a", "unknown"}
        with table.keeping(names):
            await anyio.sleep(1000)
            assert (await table.step("a", 2, "sleep 0")).turn == 3
        assert names == {"a"}
        await anyio.sleep(11)
        assert table.views() == []

    play(main, ttl_s=10)


def test_a_finished_session_is_not_kept_from_expiring() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create("a", Task("Count-v0", 0, {"end": 1}))
        await table.step("a", 0, "x")
        with table.keeping({"a"}):
            await anyio.sleep(12)
        assert table.views() == []

    play(main, ttl_s=10)


def test_a_reset_that_takes_too_long_is_given_up() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        with table.keeping({"a"}), pytest.raises(DeadlineError, match="the reset took longer than 100 s"):
            await table.create("a", Task("Sleeper-v0", 0, {"reset_s": 1000}))
        assert (clock.now(), lender.open) == (100, 0)

    play(main, ttl_s=100)


def test_a_caller_that_stops_waiting_for_a_reset_can_come_back_for_it() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        task = Task("Sleeper-v0", 0, {"reset_s": 20})
        with anyio.move_on_after(5):
            await table.create("a", task)
        assert table.get("a").state is SessionState.OPENING
        with pytest.raises(StepOrderError, match="a step before the answer to create"):
            await table.step("a", 0, "sleep 1")
        assert (await table.create("a", task)).start.observation.text == "awake"
        assert clock.now() == 20

    play(main)


def test_a_reset_that_fails_is_told_to_all_who_wait_and_frees_the_id() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        for task, error in (
            (Task("Count-v0", 0, {"end": 0}), OptionError),
            (Task("Cuont-v0", 0), UnknownEnvError),
        ):
            for _ in range(2):
                with pytest.raises(error):
                    await table.create("a", task)
            assert (lender.open, table.leased, table.views()) == (0, 0, [])
        await table.create("a", COUNT)

    play(main)


def test_a_reset_that_fails_unheard_is_told_to_the_next_who_asks() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        task = Task("Sleeper-v0", 0, {"reset_s": "no number"})
        with anyio.move_on_after(0):
            await table.create("a", task)
        await settle()
        assert table.get("a").state is SessionState.BROKEN
        with pytest.raises(EnvError, match="could not convert string to float"):
            await table.create("a", task)
        assert table.views() == []

    play(main)


def test_everything_is_given_back_when_the_server_stops() -> None:
    async def run() -> int:
        lender = Lender(slots(9))
        async with anyio.create_task_group() as tasks:

            async def step(table: SessionTable) -> None:
                with pytest.raises(SessionBrokenError, match="the server stopped"):
                    await table.step("stepping", 0, "sleep 500")

            async def create(table: SessionTable) -> None:
                with pytest.raises(SessionBrokenError, match="the server stopped"):
                    await table.create("opening", Task("Sleeper-v0", 0, {"reset_s": 500}))

            async def stop_by_an_error() -> None:
                async with SessionTable(lender) as table:
                    await table.create("ready", COUNT)
                    await table.create("stepping", SLEEPER)
                    tasks.start_soon(step, table)
                    tasks.start_soon(create, table)
                    await settle()
                    assert lender.open == 3
                    raise KeyError("not wrapped")

            with pytest.raises(KeyError, match="not wrapped"):
                await stop_by_an_error()
        assert clock.now() == 0
        return lender.open

    assert clock.run(run, virtual=True) == 0


class LosingHost:
    """Its lease breaks after ten seconds, as one on a sandbox does that dies."""

    capacity = 1

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[Episode]:
        with anyio.move_on_after(10) as scope:
            yield self
        if scope.cancelled_caught:
            raise SandboxLostError("box-1", "killed by signal 9")

    async def reset(self) -> Reset:
        return Reset(Observation("start"), {})

    async def step(self, action: str) -> Step:
        await anyio.sleep_forever()
        raise AssertionError


@pytest.mark.parametrize("is_stepping", [True, False])
def test_a_lease_that_breaks_ends_the_session_with_its_cause(is_stepping: bool) -> None:
    async def main() -> None:
        async with SessionTable(LosingHost()) as table:
            await table.create("a", COUNT)
            if not is_stepping:
                await anyio.sleep(11)
            with pytest.raises(SandboxLostError, match="box-1 lost: killed by signal 9"):
                await table.step("a", 0, "x")
            assert (table.leased, table.get("a").state) == (0, SessionState.BROKEN)

    clock.run(main, virtual=True)


def test_a_thousand_sessions_step_at_once_on_one_clock() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        turns: list[int] = []

        async def episode(id: str) -> None:
            await table.create(id, SLEEPER)
            for turn in range(3):
                turns.append((await table.step(id, turn, f"sleep {turn + 1}")).turn)
            await table.delete(id)

        async with anyio.create_task_group() as tasks:
            for number in range(1000):
                tasks.start_soon(episode, f"s{number}")
        assert (clock.now(), len(turns), sum(turns), table.tally.steps) == (6, 3000, 6000, 3000)

    play(main, capacity=1000)


def test_seconds_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        SessionTable(slots(), ttl_s=0)
