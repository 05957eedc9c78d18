"""Finds sandboxes by the ids that callers use, and runs calls with a timeout and once per idempotency key."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

import anyio
import msgspec

from envkit.errors import (
    DeadlineError,
    EnvkitError,
    RequestError,
    UnreachableError,
)
from envkit.http.auth.caller import Caller, renamed
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.asgi import retry_after_s
from envkit.http.protocol.messages import Problem, write
from envkit.http.sandboxes.idempotency import CallOutcome, IdempotentCalls
from envkit.protocols import Sandbox, SandboxPool
from envkit.types import SandboxView

MAX_TIMEOUT_S = 3600.0
"""Default limit on the timeout of a command, in seconds."""

SLACK_S = 30.0
"""Seconds beyond a command's own timeout within which the sandbox must answer."""

Keyed: TypeAlias = wire.ExecFrame | wire.ShellFrame | wire.WriteFrame | wire.SnapshotFrame
T = TypeVar("T")


def seen_by(caller: Caller) -> str | None:
    """Return the tenant whose sandboxes `caller` may see; None for an administrator, who may see all sandboxes."""
    return None if caller.is_admin else caller.tenant


class SandboxLookup:
    """Functions that all sandbox operations share: find a sandbox, convert errors, run calls.

    Args:
        pool: Leases sandboxes.
        problem: Converts an error to the JSON problem that the caller receives.
        max_timeout_s: Maximum timeout of a command, in seconds.

    Attributes:
        keyed_calls: Runs and stores the calls with an idempotency key.
        closing: Event that is set when the server shuts down. Running calls then finish, and no new calls start.
    """

    def __init__(
        self, pool: SandboxPool, problem: Callable[[Exception], Problem], *, max_timeout_s: float = MAX_TIMEOUT_S
    ) -> None:
        self.pool = pool
        self.max_timeout_s = max_timeout_s
        self.keyed_calls = IdempotentCalls(self.failure)
        self.closing = anyio.Event()
        self._problem = problem

    async def outcome(self, work: Callable[[], Awaitable[object]]) -> CallOutcome:
        """Run `work` and return its outcome; a reply or an error becomes an outcome."""
        try:
            reply = await work()
        except Exception as error:
            return self.failure(error)
        return reply if isinstance(reply, CallOutcome) else CallOutcome(write(reply))

    def failure(self, error: Exception) -> CallOutcome:
        """Convert `error` to an outcome."""
        problem = self._problem(error)
        return CallOutcome(write(problem), problem.status, retry_after_s(problem) if problem.retry else None)

    def find(self, id: str, caller: Caller) -> Sandbox:
        """Return the sandbox that the caller calls `id`, and renew its lease.

        Raises the same errors as `SandboxPool.get`, and `UnreachableError` while the server shuts down.
        """
        self.refuse_when_closing()
        try:
            return self.pool.get(caller.key(id), tenant=seen_by(caller))
        except EnvkitError as error:
            raise self.in_caller_terms(error, id, caller) from None

    @contextmanager
    def with_caller_ids(self, id: str, caller: Caller) -> Iterator[None]:
        """In errors of the block, replace the server's key of a sandbox by the id that the caller uses."""
        try:
            yield
        except EnvkitError as error:
            raise self.in_caller_terms(error, id, caller) from None

    async def run_idempotent(
        self, body: Keyed, caller: Caller, run: Callable[[], Awaitable[object]], max_s: float
    ) -> CallOutcome:
        """Run a call and return its outcome. If the request has an idempotency key, run the call only once per key.

        Args:
            body: The request, with its idempotency key.
            caller: The caller of the request.
            run: Function that runs the call.
            max_s: Timeout of the call, in seconds.
            reservation: Memory of the request and its answer. It is not released before the call has ended.
        """

        async def run_in_time() -> object:
            try:
                return await within(max_s, run)
            except EnvkitError as error:
                raise self.in_caller_terms(error, body.sandbox_id, caller) from None

        work = partial(self.outcome, run_in_time)
        if body.key is None:
            return await work()
        return await self.keyed_calls.run(caller.key(body.sandbox_id), body.key, content_hash(body), work)

    def view(self, id: str, caller: Caller) -> SandboxView:
        """Return the state of the sandbox that the caller calls `id`, without renewing its lease."""
        with self.with_caller_ids(id, caller):
            return self.pool.view(caller.key(id), tenant=seen_by(caller))

    def in_caller_terms(self, error: EnvkitError, id: str, caller: Caller) -> EnvkitError:
        """Return a copy of `error` that names the sandbox by the caller's id instead of the server's key."""
        names = {caller.key(id): id}
        with suppress(EnvkitError):
            names[self.pool.view(caller.key(id), tenant=seen_by(caller)).backend_id] = id
        return renamed(error, names)

    def reply(self, view: SandboxView, caller: Caller) -> wire.SandboxReply:
        """Convert the state of a sandbox to a reply that uses the caller's id of the sandbox."""
        return wire.SandboxReply.of(replace(view, id=caller.name(view.id)))

    async def cancel_when_closing(self, scope: anyio.CancelScope) -> None:
        """Wait until the server shuts down, and then cancel `scope`."""
        await self.closing.wait()
        scope.cancel()

    async def unless_closing(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run `work`, and cancel it if the server shuts down.

        Raises:
            UnreachableError: The server shut down before `work` ended.
        """
        failure: Exception | None = UnreachableError("the server is shutting down")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.cancel_when_closing, tasks.cancel_scope)
            try:
                await work()
                failure = None
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def check_timeout(self, timeout_s: float) -> None:
        """Check that the timeout of a command is allowed.

        Raises:
            RequestError: The timeout is above `max_timeout_s`.
        """
        if timeout_s > self.max_timeout_s:
            raise RequestError(f"timeout_s must be at most {self.max_timeout_s:g}, got {timeout_s:g}")

    def refuse_when_closing(self) -> None:
        """Check that the server is not shutting down; called at the start of each call.

        Raises:
            UnreachableError: The server is shutting down.
        """
        if self.closing.is_set():
            raise UnreachableError("the server is shutting down")


async def within(bound_s: float, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` with a timeout of `bound_s` seconds.

    Raises:
        DeadlineError: `work` did not end in time.
    """
    with anyio.move_on_after(bound_s):
        return await work()
    raise DeadlineError(f"the sandbox did not answer within {bound_s:g} s")


def content_hash(body: msgspec.Struct) -> bytes:
    """Return a hash of the content of a request, to detect a repeated key with other content."""
    digest = hashlib.blake2b(type(body).__name__.encode(), digest_size=32)
    for name in body.__struct_fields__:
        value = getattr(body, name)
        part = value if isinstance(value, bytes) else repr(value).encode(errors="surrogatepass")
        digest.update(b"%b %d " % (name.encode(), len(part)))
        digest.update(part)
    return digest.digest()
