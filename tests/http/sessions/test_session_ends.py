"""How sessions end, on virtual time: deleted, expired, failed, stopped. No lease outlives its session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import anyio
import pytest

from envkit import clock
from envkit.errors import (
    DeadlineError,
    EnvError,
    EnvkitError,
    OptionError,
    SandboxLostError,
    SessionBrokenError,
    SessionNotFoundError,
    StepOrderError,
    UnknownEnvError,
)
from envkit.http.sessions.session import SessionState
from envkit.http.sessions.table import SessionTable
from envkit.protocols import EnvHost, Episode
from envkit.types import Observation, Reset, Step, Task
from tests.causes import cause
from tests.http.envs import Lender, slots
from tests.http.stage import on_table, settle
from tests.keys import key

COUNT = Task("Count-v0", 7)
SLEEPER = Task("Sleeper-v0", 0)


def test_deleting_is_safe_to_repeat_and_ends_a_session_in_any_state() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.delete(key("never made"))
        await table.create(key("ready"), COUNT)
        await table.create(key("stepping"), SLEEPER)

        async def refused(call: Awaitable[object], error: type[EnvkitError]) -> None:
            with pytest.raises(error):
                await call

        async with anyio.create_task_group() as tasks:
            opening = table.create(key("opening"), Task("Sleeper-v0", 0, {"reset_s": 50}))
            tasks.start_soon(refused, opening, SessionNotFoundError)
            tasks.start_soon(refused, table.step(key("stepping"), 0, "sleep 50"), SessionNotFoundError)
            await settle()
            for id in ("ready", "stepping", "opening"):
                await table.delete(key(id))
                await table.delete(key(id))
                with pytest.raises(SessionNotFoundError, match=f"no session {id}"):
                    await table.step(key(id), 0, "x")
        assert (clock.now(), lender.open, table.leased, table.all()) == (0, 0, 0, [])

    on_table(main)


def test_an_unused_session_expires() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), COUNT)
        await anyio.sleep(599)
        await table.step(key("a"), 0, "x")
        await anyio.sleep(599)
        assert table.get(key("a")).idle_s == 599  # reading the state is not use
        assert lender.open == 1
        await anyio.sleep(2)
        with pytest.raises(SessionNotFoundError, match="has expired"):
            await table.step(key("a"), 1, "x")
        assert lender.open == 0

    on_table(main)


def test_a_session_does_not_expire_while_it_plays_a_step_or_is_kept() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), Task("Sleeper-v0", 0, {"reset_s": 9}))
        await anyio.sleep(8)
        assert (await table.step(key("a"), 0, "sleep 30")).observation.text == "1 slept"
        await anyio.sleep(8)
        assert (await table.step(key("a"), 1, "sleep 0")).observation.text == "2 slept"
        names = {key("a"), key("unknown")}
        with table.keep_alive(names):
            await anyio.sleep(1000)
            assert (await table.step(key("a"), 2, "sleep 0")).observation.text == "3 slept"
        assert names == {key("a")}
        await anyio.sleep(11)
        assert table.all() == []

    on_table(main, ttl_s=10)


def test_a_finished_session_is_not_kept_from_expiring() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        await table.create(key("a"), Task("Count-v0", 0, {"end": 1}))
        await table.step(key("a"), 0, "x")
        with table.keep_alive({key("a")}):
            await anyio.sleep(12)
        assert table.all() == []

    on_table(main, ttl_s=10)


def test_a_reset_that_exceeds_its_timeout_is_cancelled() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        with (
            table.keep_alive({key("a")}),
            pytest.raises(DeadlineError, match="the reset exceeded its timeout of 100 s"),
        ):
            await table.create(key("a"), Task("Sleeper-v0", 0, {"reset_s": 1000}))
        assert (clock.now(), lender.open) == (100, 0)

    on_table(main, reset_timeout_s=100)


def test_a_caller_that_stops_waiting_for_a_reset_can_repeat_the_call() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        task = Task("Sleeper-v0", 0, {"reset_s": 20})
        with anyio.move_on_after(5):
            await table.create(key("a"), task)
        assert table.get(key("a")).state is SessionState.OPENING
        with pytest.raises(StepOrderError, match="the first step must wait until create has returned"):
            await table.step(key("a"), 0, "sleep 1")
        assert (await table.create(key("a"), task))[1].observation.text == "awake"
        assert clock.now() == 20

    on_table(main)


def test_a_failed_reset_is_raised_to_all_waiters_and_frees_the_id() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        for task, error in (
            (Task("Count-v0", 0, {"end": 0}), OptionError),
            (Task("Cuont-v0", 0), UnknownEnvError),
        ):
            for _ in range(2):
                with pytest.raises(error):
                    await table.create(key("a"), task)
            assert (lender.open, table.leased, table.all()) == (0, 0, [])
        await table.create(key("a"), COUNT)

    on_table(main)


def test_a_failed_reset_without_a_waiter_is_raised_by_the_next_call() -> None:
    async def main(table: SessionTable, lender: Lender) -> None:
        task = Task("Sleeper-v0", 0, {"reset_s": "no number"})
        with anyio.move_on_after(0):
            await table.create(key("a"), task)
        await settle()
        assert table.get(key("a")).state is SessionState.BROKEN
        with pytest.raises(EnvError, match="could not convert string to float"):
            await table.create(key("a"), task)
        assert table.all() == []

    on_table(main)


def test_all_leases_are_released_when_the_server_stops() -> None:
    async def run() -> int:
        lender = Lender(slots(9))
        async with anyio.create_task_group() as tasks:

            async def step(table: SessionTable) -> None:
                with pytest.raises(SessionBrokenError, match="the server stopped"):
                    await table.step(key("stepping"), 0, "sleep 500")

            async def create(table: SessionTable) -> None:
                with pytest.raises(SessionBrokenError, match="the server stopped"):
                    await table.create(key("opening"), Task("Sleeper-v0", 0, {"reset_s": 500}))

            async def stop_by_an_error() -> None:
                async with SessionTable(lender) as table:
                    await table.create(key("ready"), COUNT)
                    await table.create(key("stepping"), SLEEPER)
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


class LosingHost(EnvHost, Episode):
    """Its lease fails after ten seconds, as after the loss of a sandbox."""

    capacity = 1

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[Episode]:
        with anyio.move_on_after(10) as scope:
            yield self
        if scope.cancelled_caught:
            raise SandboxLostError("sandbox-1", cause("killed by signal 9"))

    async def reset(self) -> Reset:
        return Reset(Observation("start"), {})

    async def step(self, action: str) -> Step:
        await anyio.sleep_forever()
        raise AssertionError


@pytest.mark.parametrize("is_stepping", [True, False])
def test_a_lease_that_breaks_ends_the_session_with_its_cause(is_stepping: bool) -> None:
    async def main() -> None:
        async with SessionTable(LosingHost()) as table:
            await table.create(key("a"), COUNT)
            if not is_stepping:
                await anyio.sleep(11)
            with pytest.raises(SandboxLostError, match="sandbox-1 lost: killed by signal 9"):
                await table.step(key("a"), 0, "x")
            assert (table.leased, table.get(key("a")).state) == (0, SessionState.BROKEN)

    clock.run(main, virtual=True)
