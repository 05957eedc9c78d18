"""Steps that are started and answered through a future, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
from msgspec import Raw

from envkit import clock
from envkit.errors import (
    DeadlineError,
    EnvkitError,
    SandboxLostError,
    SessionBrokenError,
    SessionNotFoundError,
    StepOrderError,
    UnreachableError,
)
from envkit.http.sessions.session import Move, SessionState
from envkit.http.sessions.table import SessionTable
from envkit.protocols import EnvHost, Episode
from envkit.types import Observation, Reset, Step, Task
from tests.causes import cause
from tests.http.stage import settle
from tests.keys import key

TASK = Task("Far-v0", 1)


class Far(Episode):
    """A remote environment whose steps the test answers."""

    turn = 0
    is_there = True
    refusal: EnvkitError | None = None

    def __init__(self) -> None:
        self.started: list[tuple[str, asyncio.Future[Raw]]] = []
        self.stepped: list[str] = []

    async def reset(self) -> Reset:
        return Reset(Observation("start"), {})

    async def step(self, action: str) -> Step:
        self.stepped.append(action)
        await anyio.sleep(5)
        if not self.is_there:
            raise SandboxLostError("far", cause("away"))
        return Step(Observation(f"stepped {action}"), 0.0, False, False, {})

    async def repeat_step(self, action: str) -> Step:
        raise NotImplementedError

    def start_step(self, action: str) -> asyncio.Future[Raw] | None:
        if self.refusal is not None:
            raise self.refusal
        if not self.is_there:
            return None
        self.started.append((action, asyncio.get_running_loop().create_future()))
        return self.started[-1][1]

    def finish_step(self, answer: asyncio.Future[Raw]) -> Step:
        return Step(Observation(bytes(answer.result()).decode()), 0.0, False, False, {})

    def answer(self, text: str) -> None:
        self.started[-1][1].set_result(Raw(text.encode()))


class FarHost(EnvHost):
    capacity = 1

    def __init__(self) -> None:
        self.far = Far()

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[Episode]:
        yield self.far


def play(main: Callable[[SessionTable, Far], Awaitable[None]]) -> None:
    async def run() -> None:
        host = FarHost()
        async with SessionTable(host, ttl_s=600, step_timeout_s=60) as table:
            await table.create(key("a"), TASK)
            await main(table, host.far)

    clock.run(run, virtual=True)


def text(move: Move) -> str:
    return move.result().observation.text


def test_a_repeat_of_a_started_step_returns_the_same_answer() -> None:
    async def main(table: SessionTable, far: Far) -> None:
        moves: list[Move] = []
        texts: list[str] = []

        async def repeat() -> None:
            texts.append((await table.step(key("a"), 0, "x")).observation.text)

        assert table.start_step(key("a"), 0, "x", moves.append)
        assert table.get(key("a")).state is SessionState.STEPPING
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(repeat)
            await anyio.sleep(3)
            assert (moves, texts) == ([], [])
            far.answer("far 1")
        await repeat()
        assert [text(move) for move in moves] == ["far 1"]
        assert texts == ["far 1", "far 1"]
        assert (len(far.started), far.stepped, table.get(key("a")).turn) == (1, [], 1)
        assert (sum(table.counters.buckets), table.counters.step_seconds) == (1, 3)

    play(main)


def test_an_idle_session_keeps_no_message_in_memory() -> None:
    async def main(table: SessionTable, far: Far) -> None:
        assert table.start_step(key("a"), 0, "x", lambda move: None)
        far.answer("far 1")
        await settle()
        answer = weakref.ref(far.started.pop()[1])
        gc.collect()
        assert answer() is None

    play(main)


def test_a_step_that_cannot_be_started_changes_nothing() -> None:
    async def main(table: SessionTable, far: Far) -> None:
        moves: list[Move] = []
        assert not table.start_step(key("b"), 0, "x", moves.append)
        assert not table.start_step(key("a"), 1, "x", moves.append)
        far.is_there = False
        assert not table.start_step(key("a"), 0, "x", moves.append)
        far.is_there = True
        far.refusal = UnreachableError("closed")
        assert not table.start_step(key("a"), 0, "x", moves.append)
        far.refusal = None
        assert table.start_step(key("a"), 0, "x", moves.append)
        assert not table.start_step(key("a"), 0, "x", moves.append)
        with pytest.raises(StepOrderError, match="expected turn 0, got 1"):
            await table.step(key("a"), 1, "y")
        far.answer("far 1")
        await settle()
        assert [text(move) for move in moves] == ["far 1"]

    play(main)


@pytest.mark.parametrize("error", [UnreachableError("gone"), SandboxLostError("far", cause("away"))])
def test_a_started_step_whose_sandbox_is_lost_is_played_again_once(error: Exception) -> None:
    async def main(table: SessionTable, far: Far) -> None:
        moves: list[Move] = []
        assert table.start_step(key("a"), 0, "x", moves.append)
        far.started[0][1].set_exception(error)
        await anyio.sleep(4)
        assert moves == []
        assert (await table.step(key("a"), 0, "x")).observation.text == "stepped x"
        assert [text(move) for move in moves] == ["stepped x"]
        assert (far.stepped, table.get(key("a")).turn, sum(table.counters.buckets)) == (["x"], 1, 1)

    play(main)


@pytest.mark.parametrize("error", [DeadlineError("it took too long"), RuntimeError("nobody foresaw this")])
def test_any_other_error_is_the_answer_and_breaks_the_session(error: Exception) -> None:
    async def main(table: SessionTable, far: Far) -> None:
        moves: list[Move] = []
        assert table.start_step(key("a"), 0, "x", moves.append)
        far.started[0][1].set_exception(error)
        await settle()
        for _ in range(2):
            with pytest.raises(EnvkitError, match=str(error)):
                moves[0].result()
        assert (table.get(key("a")).state, far.stepped, len(moves)) == (SessionState.BROKEN, [], 1)

    play(main)


def test_the_deadline_of_a_started_step_begins_with_the_step() -> None:
    async def main(table: SessionTable, far: Far) -> None:
        moves: list[Move] = []
        await anyio.sleep(300)
        assert table.start_step(key("a"), 0, "x", moves.append)
        await anyio.sleep(59)
        far.answer("far 1")
        await settle()
        assert [text(move) for move in moves] == ["far 1"]

    play(main)


def test_an_unrecoverable_sandbox_loss_breaks_the_session() -> None:
    async def main(table: SessionTable, far: Far) -> None:
        moves: list[Move] = []
        assert table.start_step(key("a"), 0, "x", moves.append)
        far.is_there = False
        far.started[0][1].set_exception(SandboxLostError("far", cause("away")))
        await anyio.sleep(6)
        with pytest.raises(SandboxLostError, match="away"):
            moves[0].result()
        with pytest.raises(SessionBrokenError):
            await table.step(key("a"), 1, "y")

    play(main)


@pytest.mark.parametrize("when", ["before the answer", "in the moment of the answer", "while it is played again"])
def test_deleting_a_session_cancels_its_started_step(when: str) -> None:
    async def main(table: SessionTable, far: Far) -> None:
        moves: list[Move] = []
        assert table.start_step(key("a"), 0, "x", moves.append)
        if when == "in the moment of the answer":
            far.answer("far 1")
        elif when == "while it is played again":
            far.started[0][1].set_exception(UnreachableError("gone"))
            await anyio.sleep(1)
        with anyio.fail_after(1):
            await table.delete(key("a"))
        with pytest.raises(SessionNotFoundError, match="was deleted"):
            moves[0].result()
        assert (len(moves), table.leased) == (1, 0)

    play(main)


def test_a_started_step_has_a_deadline() -> None:
    async def main(table: SessionTable, far: Far) -> None:
        moves: list[Move] = []
        assert table.start_step(key("a"), 0, "x", moves.append)
        await anyio.sleep(62)
        with pytest.raises(DeadlineError, match="timeout of 60 s"):
            moves[0].result()
        assert far.started[0][1].cancelled()
        assert (table.get(key("a")).state, table.leased) == (SessionState.BROKEN, 0)

    play(main)


def test_a_server_that_stops_answers_started_steps() -> None:
    moves: list[Move] = []

    async def main(table: SessionTable, far: Far) -> None:
        assert table.start_step(key("a"), 0, "x", moves.append)

    play(main)
    with pytest.raises(EnvkitError, match="the server stopped"):
        moves[0].result()
