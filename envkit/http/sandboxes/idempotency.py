"""Calls that carry a key, so that they can be asked again: what runs runs once, and its answer is kept for a while.

* The same key with the same content gives the same answer again; a repeat that comes while the first runs waits for it.
* The same key with other content is refused.
* Whoever made a call with a key may go away: the call goes on, and its answer waits.

Keys belong to one sandbox and are forgotten with it. Of all of them the last `MAX_COUNT` are remembered, for `KEEP_S`
seconds. Answers share `MAX_BYTES`: where they have more, the oldest are dropped, and who asks for one again is told so
instead of having the call run twice.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeAlias

import anyio
from anyio.abc import TaskGroup

from envkit import clock
from envkit.errors import SandboxConflictError

KEEP_S = 600.0
MAX_COUNT = 10_000
MAX_BYTES = 64 << 20

Work: TypeAlias = Callable[[], Awaitable["CallOutcome"]]


class Shared(Protocol):
    """What a call takes and others may hold as well, such as `envkit.http.limits.memory_budget.Room`."""

    def share(self) -> None:
        """Keep it until `free` is called once more."""
        ...

    def free(self) -> None: ...


class CallOutcome(NamedTuple):
    """What came of a call, encoded.

    Attributes:
        body: The answer, or the problem, as JSON.
        status: As in HTTP; from 400 on `body` is a problem.
        retry_after_s: Seconds after which asking again may help; None where it does not, and where there is no problem.
    """

    body: bytes
    status: int = 200
    retry_after_s: int | None = None

    @property
    def framed(self) -> bytes:
        """The same as what is said in a frame or a list."""
        return (b'{"result":%b}' if self.status < 400 else b'{"error":%b}') % self.body


class _KeyedCall:
    __slots__ = ("content", "done", "ended_at", "outcome", "scope")

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.done = anyio.Event()
        self.scope = anyio.CancelScope()
        self.outcome: CallOutcome | None = None
        self.ended_at = 0.0


class IdempotentCalls:
    """The calls with keys, of all sandboxes of a server.

    Args:
        failure: Returns the outcome that tells of an error.
        keep_s: Seconds for which an answer is kept.
        max_count: Number of answers that are kept.
        max_bytes: Bytes that they may have together.
    """

    def __init__(
        self,
        failure: Callable[[Exception], CallOutcome],
        *,
        keep_s: float = KEEP_S,
        max_count: int = MAX_COUNT,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.tasks: TaskGroup | None = None
        """Where calls run, since they outlive those who ask; None while the server is not running."""
        self._failure = failure
        self._keep_s = keep_s
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._calls: defaultdict[str, dict[str, _KeyedCall]] = defaultdict(dict)
        self._ended: OrderedDict[tuple[str, str], _KeyedCall] = OrderedDict()
        self._full: OrderedDict[tuple[str, str], _KeyedCall] = OrderedDict()
        self._bytes = 0

    async def once(
        self, sandbox_id: str, key: str, content: bytes, work: Work, takes: Shared | None = None
    ) -> CallOutcome:
        """Run `work`, or give what came of it again.

        Args:
            sandbox_id: Whose call it is.
            key: Which call it is.
            content: What was asked for; or, where that is long, a hash of it.
            work: Does it; raises nothing.
            takes: What it takes, kept until it is done even if whoever asks goes away.

        Raises:
            SandboxConflictError: The key belongs to another call.
        """
        call = self._calls[sandbox_id].get(key) if sandbox_id in self._calls else None
        if call is None:
            assert self.tasks is not None
            call = self._calls[sandbox_id][key] = _KeyedCall(content)
            if takes is not None:
                takes.share()
            self.tasks.start_soon(self._run, sandbox_id, key, call, work, takes)
        elif call.content not in (content, _ANY):
            raise SandboxConflictError(f"the key {key!r} belongs to another call of this sandbox")
        await call.done.wait()
        assert call.outcome is not None
        return call.outcome

    async def cancel(self, sandbox_id: str, key: str) -> None:
        """End a call and wait until that is done; one that comes later does not begin."""
        call = self._calls[sandbox_id].get(key)
        if call is None:
            call = self._calls[sandbox_id][key] = _KeyedCall(_ANY)
            self._end(sandbox_id, key, call, self._failure(_cancelled(key)))
        call.scope.cancel()
        await call.done.wait()

    def drop(self, sandbox_id: str) -> None:
        """Forget the calls of a sandbox; those that run end by themselves."""
        for key in self._calls.pop(sandbox_id, {}):
            self._ended.pop((sandbox_id, key), None)
            self._blank(sandbox_id, key)

    async def _run(self, sandbox_id: str, key: str, call: _KeyedCall, work: Work, takes: Shared | None) -> None:
        outcome = None
        try:
            with call.scope:
                outcome = await work()
        finally:
            self._end(sandbox_id, key, call, outcome or self._failure(_cancelled(key)))
            if takes is not None:
                takes.free()

    def _end(self, sandbox_id: str, key: str, call: _KeyedCall, outcome: CallOutcome) -> None:
        call.outcome = outcome
        call.ended_at = clock.now()
        call.done.set()
        if self._calls.get(sandbox_id, {}).get(key) is call:  # else it was dropped meanwhile
            place = sandbox_id, key
            self._ended[place] = self._full[place] = call
            self._bytes += len(outcome.body)
            self._trim()

    def _trim(self) -> None:
        oldest_s = clock.now() - self._keep_s
        while self._ended:
            (sandbox_id, key), call = next(iter(self._ended.items()))
            if len(self._ended) <= self._max_count and call.ended_at >= oldest_s:
                break
            del self._ended[sandbox_id, key]
            self._blank(sandbox_id, key)
            calls = self._calls[sandbox_id]
            del calls[key]
            if not calls:
                del self._calls[sandbox_id]
        while self._bytes > self._max_bytes:
            sandbox_id, key = next(iter(self._full))
            gone = _KeyedCall(self._full[sandbox_id, key].content)
            gone.outcome = self._failure(SandboxConflictError(f"the answer to the key {key!r} is not kept any more"))
            gone.ended_at = self._full[sandbox_id, key].ended_at
            gone.done.set()
            self._blank(sandbox_id, key)
            # Those who wait for the answer hold the call itself.
            self._calls[sandbox_id][key] = self._ended[sandbox_id, key] = gone

    def _blank(self, sandbox_id: str, key: str) -> None:
        call = self._full.pop((sandbox_id, key), None)
        if call is not None and call.outcome is not None:
            self._bytes -= len(call.outcome.body)


_ANY = b""
"""The content of a call that was ended before it came; no call has it, since every content is some JSON."""


def _cancelled(key: str) -> SandboxConflictError:
    return SandboxConflictError(f"the call with the key {key!r} was cancelled")
