"""Sessions on virtual time: repeats, order, expiry, deadlines, and release of leases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.errors import (
    CapacityError,
    DeadlineError,
    EnvError,
    SandboxStartError,
    SessionBrokenError,
    SessionConflictError,
    StepOrderError,
)
from envkit.http.sessions.session import SessionState
from envkit.http.sessions.table import SessionTable
from envkit.protocols import Episode
from envkit.types import Step, Task
from tests.http.envs import Lender, slots
from tests.http.stage import on_table, settle
from tests.keys import key

COUNT = Task("Count-v0", 7)
SLEEPER = Task("Sleeper-v0", 0)


def test_a_host_without_slots_raises_its_own_reason() -> None:
    class Gone(Lender):
        @property
        def capacity(self) -> int:
            return 0

        @asynccontextmanager
        async def lease(self, task: Task) -> AsyncIterator[Episode]:
            await anyio.sleep(3)
            if self.capacity == 0:
                raise SandboxStartError("fleet", "no sandbox is healthy")
            async with super().lease(task) as episode:
                yield episode

    async def main() -> None:
        async with SessionTable(Gone(slots())) as table:
            with pytest.raises(SandboxStartError, match="no sandbox is healthy"):
                await table.create(key("a"), COUNT)

    clock.run(main, virtual=True)


def test_creating_again_returns_the_same_start_and_the_current_turn() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        first = await table.create(key("a"), COUNT)
        assert await table.create(key("a"), Task("Count-v0", 7)) == first
        await table.step(key("a"), 0, "x")
        assert await table.create(key("a"), COUNT) == (1, first[1])
        assert lender.open == 1

    on_table(main)


def test_an_id_in_use_is_refused_to_another_task() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), COUNT)
        with pytest.raises(SessionConflictError, match="session a plays another task"):
            await table.create(key("a"), Task("Count-v0", 8))

    on_table(main)


def test_a_step_out_of_turn_or_with_another_action_is_refused_and_changes_nothing() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), COUNT)
        await table.step(key("a"), 0, "x")
        with pytest.raises(SessionConflictError, match="turn 0 was played with another action"):
            await table.step(key("a"), 0, "y")
        for turn in (2, 9):
            with pytest.raises(StepOrderError, match=f"expected turn 1, got {turn}"):
                await table.step(key("a"), turn, "x")
        assert (await table.step(key("a"), 1, "x")).observation.text == "2 x"
        with pytest.raises(StepOrderError, match="expected turn 2, got 0"):
            await table.step(key("a"), 0, "x")

    on_table(main)


def test_a_repeat_that_comes_while_the_step_is_played_waits_for_its_answer() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), SLEEPER)
        answers: list[tuple[float, Step]] = []

        async def step() -> None:
            answers.append((clock.now(), await table.step(key("a"), 0, "sleep 10")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step)
            await anyio.sleep(4)
            tasks.start_soon(step)
            await settle()
            with pytest.raises(SessionConflictError):
                await table.step(key("a"), 0, "sleep 1")
            with pytest.raises(StepOrderError):
                await table.step(key("a"), 1, "sleep 1")
        assert clock.now() == 10
        assert [answer.observation.text for _, answer in answers] == ["1 slept", "1 slept"]

    on_table(main)


def test_a_step_that_is_cancelled_in_the_environment_breaks_its_session() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), SLEEPER)
        with anyio.move_on_after(3):
            await table.step(key("a"), 0, "sleep 10")
        assert table.get(key("a")).state is SessionState.BROKEN
        for turn, action in ((0, "sleep 10"), (0, "sleep 1"), (1, "sleep 1")):
            with pytest.raises(SessionBrokenError, match=r"^session a: cancelled in turn 0$"):
                await table.step(key("a"), turn, action)
        await settle()
        assert (lender.open, lender.void) == (0, 1)

    on_table(main)


def test_the_limit_of_the_environment_extends_the_deadline_of_a_step() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), Task("Sleeper-v0", 0, {"limit_s": 100.0}))
        await table.step(key("a"), 0, "sleep 110")
        with pytest.raises(DeadlineError, match="timeout of 130 s"):
            await table.step(key("a"), 1, "sleep 3600")

    on_table(main)


def test_a_step_past_its_deadline_is_cancelled_and_breaks_the_session() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), SLEEPER)
        for _ in range(2):  # a repeat raises the same
            with pytest.raises(DeadlineError, match="timeout of 60 s"):
                await table.step(key("a"), 0, "sleep 3600")
            assert clock.now() == 60
        with pytest.raises(SessionBrokenError, match="broke at turn 0: the step exceeded its timeout of 60 s"):
            await table.step(key("a"), 1, "sleep 1")
        await settle()
        assert (lender.open, lender.void) == (0, 1)

    on_table(main)


def test_an_error_of_the_environment_breaks_the_session_and_is_repeated() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), COUNT)
        for _ in range(2):
            with pytest.raises(EnvError, match=r"Count-v0 raised ValueError in step: boom \(.*envs.py:\d+\)"):
                await table.step(key("a"), 0, "raise")
        with pytest.raises(SessionBrokenError, match="boom"):
            await table.step(key("a"), 0, "x")
        await settle()
        assert (lender.open, lender.void, table.leased) == (0, 1, 0)

    on_table(main)


def test_an_episode_that_ends_releases_its_slot_and_keeps_its_last_answer() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), Task("Count-v0", 7, {"end": 1}))
        last = await table.step(key("a"), 0, "x")
        assert last.terminated
        await settle()
        assert (lender.open, lender.void, table.leased) == (0, 0, 0)
        assert await table.step(key("a"), 0, "x") == last
        with pytest.raises(StepOrderError, match="after the end of the episode"):
            await table.step(key("a"), 1, "x")
        await table.create(key("b"), COUNT)

    on_table(main, capacity=1)


def test_a_full_host_fails_at_once_and_has_a_slot_again_after_a_delete() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), COUNT)
        with pytest.raises(CapacityError, match="all 1 slots are in use"):
            await table.create(key("b"), COUNT)
        assert clock.now() == 0
        await table.delete(key("a"))
        await table.create(key("b"), COUNT)

    on_table(main, capacity=1)


def test_a_tenant_gets_its_share_of_the_slots_and_always_one() -> None:
    async def main() -> None:
        async with SessionTable(Lender(slots(4)), tenant_share=0.5) as table:
            for one in (key("a", "acme"), key("b", "acme"), key("a", "umbrella"), key("a")):
                await table.create(one, COUNT)
            await table.delete(key("a"))
            with pytest.raises(CapacityError, match=r"this tenant uses 2 of 4 slots \(its limit\)"):
                await table.create(key("c", "acme"), COUNT)
            await table.delete(key("a", "acme"))
            await table.create(key("c", "acme"), COUNT)
        async with SessionTable(Lender(slots(1)), tenant_share=0.1) as table:
            await table.create(key("a", "acme"), COUNT)

    clock.run(main, virtual=True)
