"""Sessions whose episodes are graded, and hosts whose slots are divided into parts, on virtual time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.errors import (
    CapacityError,
    DeadlineError,
    EnvError,
    EnvkitError,
    SandboxStartError,
    SessionNotFoundError,
    StepOrderError,
)
from envkit.http.sessions.session import SessionState
from envkit.http.sessions.table import SessionTable
from envkit.types import Task
from tests.http.envs import Lender, slots
from tests.http.stage import on_table, settle
from tests.keys import key

PLAYED = "the episode has ended"
STOPPED = "the player has stopped"


def graded(**options: Any) -> Task:
    return Task("Graded-v0", 0, options)


@pytest.mark.parametrize("end", [PLAYED, STOPPED])
def test_a_graded_session_keeps_its_lease_until_it_is_graded_once(end: str) -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), graded(grade=0.5, grade_s=5))
        step = await table.step(key("a"), 0, "end" if end == PLAYED else "go on")
        await anyio.sleep(500)
        assert (lender.open, step.ended) == (1, end == PLAYED)
        first = await table.grade(key("a"))
        assert (first, await table.grade(key("a")), lender.open) == (0.5, 0.5, 0)
        assert await table.step(key("a"), 0, step.observation.text) == step
        with pytest.raises(StepOrderError, match="step after the end of the episode"):
            await table.step(key("a"), 1, "x")

    on_table(main)


def test_a_caller_that_stops_waiting_for_a_grade_can_repeat_the_call() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), graded(grade_s=20))
        with anyio.move_on_after(5):
            await table.grade(key("a"))
        assert table.get(key("a")).state is SessionState.GRADING
        assert (await table.grade(key("a")), clock.now()) == (1.0, 20)

    on_table(main)


def test_a_grader_that_cannot_run_has_no_grade() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), graded(grade=None))
        assert await table.grade(key("a")) is None

    on_table(main)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"grade": "boom"}, EnvError, "ValueError in grade: boom"),
        ({"grade_s": 1000}, DeadlineError, "the grader exceeded its timeout of 30 s"),
        ({"grade_s": 1000, "limit_s": 100.0}, DeadlineError, "the grader exceeded its timeout of 130 s"),
    ],
)
def test_repeats_raise_the_error_of_a_grader_that_failed(
    options: dict[str, Any], error: type[EnvkitError], text: str
) -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), graded(**options))
        for _ in range(2):
            with pytest.raises(error, match=text):
                await table.grade(key("a"))
        assert (lender.open, table.get(key("a")).state) == (0, SessionState.BROKEN)

    on_table(main, grade_timeout_s=30)


def test_a_session_that_is_not_graded_or_still_steps_refuses_a_grade() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), Task("Sleeper-v0", 0))
        with pytest.raises(StepOrderError, match="session a: its episode has no grader"):
            await table.grade(key("a"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(table.step, key("a"), 0, "sleep 5")
            await settle()
            with pytest.raises(StepOrderError, match="session a: grade must wait until the call in progress"):
                await table.grade(key("a"))

    on_table(main)


def test_deleting_a_session_cancels_its_grader() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), graded(grade_s=50))

        async def grade() -> None:
            with pytest.raises(SessionNotFoundError, match="session a was deleted"):
                await table.grade(key("a"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(grade)
            await settle()
            await table.delete(key("a"))
        assert (clock.now(), lender.open) == (0, 0)

    on_table(main)


def test_an_environment_without_room_for_its_sandbox_fails_and_is_not_a_full_server() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        with pytest.raises(SandboxStartError, match="sandbox of Graded-v0 did not start: no room for its sandbox"):
            await table.create(key("a"), graded(full=True))
        assert lender.open == 0

    on_table(main)


class Parted(Lender):
    """Has 4 slots for Graded-v0 and 8 for the others."""

    def __init__(self) -> None:
        super().__init__(slots(12))

    def partition_of(self, env_id: str, tenant: str) -> tuple[str, int]:
        return ("environments", 8) if env_id == "Count-v0" else ("environments with tools", 4)


def test_a_fifth_episode_of_a_part_with_four_slots_is_refused_at_once() -> None:
    async def main() -> None:
        async with SessionTable(Parted()) as table:
            for name in "abc":
                await table.create(key(name), graded())
            await table.create(key("d"), Task("Sleeper-v0", 0))
            with pytest.raises(CapacityError, match="all 4 slots for environments with tools are in use; retry later"):
                await table.create(key("e"), graded())
            await table.create(key("other"), Task("Count-v0", 0))
            await table.delete(key("a"))
            await table.create(key("e"), graded())
            assert clock.now() == 0

    clock.run(main, virtual=True)


def test_a_tenant_gets_only_its_share_of_the_slots_of_a_part() -> None:
    async def main() -> None:
        async with SessionTable(Parted(), tenant_share=0.5) as table:
            for name in "ab":
                await table.create(key(name, "one"), graded())
            with pytest.raises(CapacityError, match="this tenant uses 2 of 4 slots for environments with tools"):
                await table.create(key("c", "one"), graded())
            await table.create(key("c", "two"), graded())

    clock.run(main, virtual=True)
