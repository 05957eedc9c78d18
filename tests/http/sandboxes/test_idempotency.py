"""Calls with idempotency keys run once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from envkit import clock
from envkit.errors import EnvkitError
from envkit.http.protocol.asgi import CallOutcome
from envkit.http.sandboxes.idempotency import IdempotentCalls
from tests.http.stage import settle
from tests.keys import key


class Work:
    """Answers with the number of its run, after `seconds`."""

    def __init__(self, seconds: float = 0.0, size: int = 1) -> None:
        self.runs = 0
        self._seconds = seconds
        self._size = size

    async def __call__(self) -> CallOutcome:
        self.runs += 1
        await anyio.sleep(self._seconds)
        return CallOutcome(b"%d" % self.runs * self._size)


def outcome_of(error: Exception) -> CallOutcome:
    assert isinstance(error, EnvkitError)
    return CallOutcome(error.detail.encode(), error.status)


def on_calls(main: Callable[[IdempotentCalls], Awaitable[None]], **bounds: Any) -> None:
    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            calls = IdempotentCalls(outcome_of, **bounds)
            calls.tasks = tasks
            await main(calls)
            tasks.cancel_scope.cancel()

    clock.run(run, virtual=True)


def test_a_repeat_returns_the_first_answer_for_ten_minutes() -> None:
    async def main(calls: IdempotentCalls) -> None:
        work = Work()
        for _ in range(3):
            assert (await calls.run(key("one"), "a", b"x", work)).body == b"1"
        assert (await calls.run(key("one"), "b", b"x", work)).body == b"2"
        assert (await calls.run(key("other"), "a", b"x", work)).body == b"3"
        await anyio.sleep(599)
        assert (await calls.run(key("one"), "a", b"x", work)).body == b"1"
        await anyio.sleep(2)
        assert (await calls.run(key("one"), "c", b"x", work)).body == b"4"
        assert (await calls.run(key("one"), "a", b"x", work)).body == b"5"

    on_calls(main)


def test_a_cancelled_key_does_not_start_again() -> None:
    async def main(calls: IdempotentCalls) -> None:
        work = Work(seconds=100)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(calls.run, key("one"), "a", b"x", work)
            await settle()
            await calls.cancel(key("one"), "a")
        assert clock.now() == 0
        for name in ("a", "b"):
            await calls.cancel(key("one"), name)
            again = await calls.run(key("one"), name, b"x", work)
            assert (again.status, again.body) == (409, f"the call with the key '{name}' was cancelled".encode())
        assert work.runs == 1

    on_calls(main)


def test_the_oldest_large_answers_are_dropped_and_their_calls_do_not_run_again() -> None:
    async def main(calls: IdempotentCalls) -> None:
        works = {name: Work(size=40) for name in "abc"}
        for name, work in works.items():
            assert (await calls.run(key("one"), name, b"x", work)).body == b"1" * 40
        gone = await calls.run(key("one"), "a", b"x", works["a"])
        assert (gone.status, gone.body) == (409, b"the answer for the key 'a' is no longer stored")
        for name in "bc":
            assert (await calls.run(key("one"), name, b"x", works[name])).body == b"1" * 40
        huge = Work(size=1000)
        assert (await calls.run(key("one"), "huge", b"x", huge)).body == b"1" * 1000
        assert (await calls.run(key("one"), "huge", b"x", huge)).status == 409
        assert (huge.runs, works["a"].runs) == (1, 1)

    on_calls(main, max_bytes=100)
