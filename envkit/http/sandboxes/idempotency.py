"""Calls with an idempotency key: each call runs only once, and its answer is stored for repeated calls.

* A repeated call with the same key and content gets the same answer. If the first call still runs, the repeated call
  waits for it.
* A call with the same key and other content is rejected.
* A call continues if its caller disconnects, and its answer is stored.

A key is valid for one sandbox and is deleted with the sandbox. Keys are deleted `KEEP_S` seconds after their call has
ended; if there are more than `MAX_COUNT`, the oldest are deleted earlier. If all stored answers together have more than
`MAX_BYTES` bytes, the oldest answers are deleted, but not their keys. A call that is repeated after its answer was
deleted fails, so that nothing runs twice. A call that is repeated after its key was deleted runs again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import anyio
from anyio.abc import TaskGroup

from envkit import clock
from envkit.errors import SandboxConflictError
from envkit.http.protocol.asgi import CallOutcome
from envkit.types import TenantKey

KEEP_S = 600.0
MAX_COUNT = 10_000
MAX_BYTES = 64 << 20

Work: TypeAlias = Callable[[], Awaitable[CallOutcome]]
_FullKey: TypeAlias = tuple[TenantKey, str]


@dataclass(slots=True, eq=False)
class _KeyedCall:
    content: bytes
    done: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    outcome: CallOutcome | None = None
    ended_at: float = 0.0


class IdempotentCalls:
    """Runs and stores the calls with idempotency keys, for all sandboxes of a server.

    `failure` converts the error of a call to its outcome. See the docstring of this module for the limits.
    """

    def __init__(
        self, failure: Callable[[Exception], CallOutcome], *, max_count: int = MAX_COUNT, max_bytes: int = MAX_BYTES
    ) -> None:
        self.tasks: TaskGroup | None = None
        """Runs the calls, which outlive their callers; None while the server is not running."""
        self._failure = failure
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._calls: dict[_FullKey, _KeyedCall] = {}
        self._ended: OrderedDict[_FullKey, _KeyedCall] = OrderedDict()
        """The calls that have ended, in this order."""
        self._with_outcome: OrderedDict[_FullKey, _KeyedCall] = OrderedDict()
        """Those of them whose answer is stored."""
        self._bytes = 0

    async def run(self, sandbox: TenantKey, key: str, content: bytes, work: Work) -> CallOutcome:
        """Run `work`, or return the outcome of an earlier call with the same key.

        `content` is the content of the call, or its hash. `work` runs the call, and must not raise an error.

        Raises:
            SandboxConflictError: An earlier call with this idempotency key had different content.
        """
        call = self._calls.get((sandbox, key))
        if call is None:
            assert self.tasks is not None
            call = self._calls[sandbox, key] = _KeyedCall(content)
            self.tasks.start_soon(self._run, (sandbox, key), call, work)
        elif call.content not in (content, _CANCELLED_CONTENT):
            raise SandboxConflictError(f"the key {key!r} belongs to another call of this sandbox; use a new key")
        await call.done.wait()
        assert call.outcome is not None
        return call.outcome

    async def cancel(self, sandbox: TenantKey, key: str) -> None:
        """Cancel the call with this idempotency key, and wait until it has ended. If there is no such call yet, a later
        call with this key does not start.
        """
        call = self._calls.get((sandbox, key))
        if call is None:
            call = self._calls[sandbox, key] = _KeyedCall(_CANCELLED_CONTENT)
            self._end((sandbox, key), call, self._failure(_cancelled(key)))
        call.scope.cancel()
        await call.done.wait()

    def drop(self, sandbox: TenantKey) -> None:
        """Delete the keys and answers of a stopped sandbox. Running calls are not cancelled: they end by themselves."""
        for key in [key for key in self._calls if key[0] == sandbox]:
            self._forget(key)

    async def _run(self, key: _FullKey, call: _KeyedCall, work: Work) -> None:
        outcome = None
        try:
            with call.scope:
                outcome = await work()
        finally:
            self._end(key, call, outcome or self._failure(_cancelled(key[1])))

    def _end(self, key: _FullKey, call: _KeyedCall, outcome: CallOutcome) -> None:
        call.outcome = outcome
        call.ended_at = clock.now()
        call.done.set()
        if self._calls.get(key) is call:  # otherwise `drop` removed it
            self._ended[key] = self._with_outcome[key] = call
            self._bytes += len(outcome.body)
            self._trim()

    def _trim(self) -> None:
        expired_s = clock.now() - KEEP_S
        while self._ended:
            key, call = next(iter(self._ended.items()))
            if len(self._ended) <= self._max_count and call.ended_at >= expired_s:
                break
            self._forget(key)
        while self._bytes > self._max_bytes:
            key, call = next(iter(self._with_outcome.items()))
            error = SandboxConflictError(f"the answer for the key {key[1]!r} is no longer stored")
            self._drop_outcome(key)
            # From now on, a repeated call gets this error. Callers that already wait hold the old `_KeyedCall`, so they
            # still get its answer.
            self._calls[key] = self._ended[key] = replace(call, outcome=self._failure(error))

    def _forget(self, key: _FullKey) -> None:
        del self._calls[key]
        self._ended.pop(key, None)
        self._drop_outcome(key)

    def _drop_outcome(self, key: _FullKey) -> None:
        call = self._with_outcome.pop(key, None)
        if call is not None and call.outcome is not None:
            self._bytes -= len(call.outcome.body)


_CANCELLED_CONTENT = b""
"""Stored in place of the content of a call that was cancelled before it arrived. Other content is never empty."""


def _cancelled(key: str) -> SandboxConflictError:
    return SandboxConflictError(f"the call with the key {key!r} was cancelled")
