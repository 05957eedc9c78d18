"""How calls about sandboxes come to them: by the caller's names, with bounds in seconds, and once for each key."""

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
from envkit.http.limits.memory_budget import Reservation
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.asgi import retry_after_s
from envkit.http.protocol.messages import Problem, write
from envkit.http.sandboxes.idempotency import CallOutcome, IdempotentCalls
from envkit.protocols import Sandbox, SandboxPool
from envkit.types import SandboxView

MAX_TIMEOUT_S = 3600.0
"""The longest that a command may ask for, unless the caller of `SandboxLookup` says otherwise."""

SLACK_S = 30.0
"""Seconds beyond its own time in which a sandbox has to answer."""

Keyed: TypeAlias = wire.ExecFrame | wire.ShellFrame | wire.WriteFrame | wire.SnapshotFrame
T = TypeVar("T")


def seen_by(caller: Caller) -> str | None:
    """Return the tenant whose sandboxes `caller` sees; None for an administrator, who sees those of all."""
    return None if caller.is_admin else caller.tenant


class SandboxLookup:
    """What all calls about sandboxes need.

    Args:
        pool: Lends them.
        problem: Returns what a caller is told about an error.
        max_timeout_s: The longest that a command may ask for, seconds.

    Attributes:
        repeats: What was called with a key.
        closing: Set when the server shuts down: what runs is finished, nothing new is begun.
    """

    def __init__(
        self, pool: SandboxPool, problem: Callable[[Exception], Problem], *, max_timeout_s: float = MAX_TIMEOUT_S
    ) -> None:
        self.pool = pool
        self.max_timeout_s = max_timeout_s
        self.repeats = IdempotentCalls(self.failure)
        self.closing = anyio.Event()
        self._problem = problem

    async def outcome(self, work: Callable[[], Awaitable[object]]) -> CallOutcome:
        """Return what comes of `work`, be it a result or an error."""
        try:
            return CallOutcome(write(await work()))
        except Exception as error:
            return self.failure(error)

    async def attempt(self, work: Callable[[], Awaitable[CallOutcome]]) -> CallOutcome:
        """Return the outcome that `work` gives, or that tells of what it raises."""
        try:
            return await work()
        except Exception as error:
            return self.failure(error)

    def failure(self, error: Exception) -> CallOutcome:
        """Return the outcome that tells of `error`."""
        problem = self._problem(error)
        return CallOutcome(write(problem), problem.status, retry_after_s(problem) if problem.retry else None)

    def find(self, id: str, caller: Caller) -> Sandbox:
        """Return a sandbox that is to be used. Raises as `SandboxPool.get`, and while the server shuts down."""
        self.refuse_when_closing()
        try:
            return self.pool.get(caller.key(id), tenant=seen_by(caller))
        except EnvkitError as error:
            raise self.named(error, id, caller) from None

    @contextmanager
    def naming(self, id: str, caller: Caller) -> Iterator[None]:
        """Have errors of the block call a sandbox what `caller` calls it."""
        try:
            yield
        except EnvkitError as error:
            raise self.named(error, id, caller) from None

    async def once(
        self, body: Keyed, caller: Caller, run: Callable[[], Awaitable[object]], bound_s: float, room: Reservation
    ) -> CallOutcome:
        """Return what comes of `run`, which is done once for each key.

        Args:
            body: What is asked for.
            caller: Who asks.
            run: Does it.
            bound_s: Seconds that it may take.
            room: What it takes, kept until it is done.
        """

        async def named() -> object:
            try:
                return await within(bound_s, run)
            except EnvkitError as error:
                raise self.named(error, body.sandbox_id, caller) from None

        work = partial(self.outcome, named)
        if body.key is None:
            return await work()
        return await self.repeats.once(caller.key(body.sandbox_id), body.key, content_of(body), work, room)

    def view(self, id: str, caller: Caller) -> SandboxView:
        """Look at a sandbox."""
        with self.naming(id, caller):
            return self.pool.view(caller.key(id), tenant=seen_by(caller))

    def named(self, error: EnvkitError, id: str, caller: Caller) -> EnvkitError:
        """Return an error that calls a sandbox what `caller` calls it."""
        names = {caller.key(id): id}
        with suppress(EnvkitError):
            names[self.pool.view(caller.key(id), tenant=seen_by(caller)).backend_id] = id
        return renamed(error, names)

    def seen(self, view: SandboxView, caller: Caller) -> wire.SandboxReply:
        """Return what a caller is told of a sandbox."""
        return wire.SandboxReply.of(replace(view, id=caller.name(view.id)))

    async def cancel_when_closing(self, scope: anyio.CancelScope) -> None:
        """Cancel `scope` when the server shuts down."""
        await self.closing.wait()
        scope.cancel()

    async def unless_closing(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do `work`, which a shutdown of the server ends.

        Raises:
            UnreachableError: That came first.
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
        """Let pass what a command may ask for.

        Raises:
            RequestError: It is longer.
        """
        if timeout_s > self.max_timeout_s:
            raise RequestError(f"timeout_s may be {self.max_timeout_s:g} at most, got {timeout_s:g}")

    def refuse_when_closing(self) -> None:
        """Begin nothing new.

        Raises:
            UnreachableError: The server shuts down.
        """
        if self.closing.is_set():
            raise UnreachableError("the server is shutting down")


async def within(bound_s: float, work: Callable[[], Awaitable[T]]) -> T:
    """Do `work`, for `bound_s` seconds at most.

    Raises:
        DeadlineError: It takes longer.
    """
    with anyio.move_on_after(bound_s):
        return await work()
    raise DeadlineError(f"the sandbox did not answer within {bound_s:g} s")


def content_of(body: msgspec.Struct) -> bytes:
    """Return what a call asks for, in few bytes."""
    digest = hashlib.blake2b(type(body).__name__.encode(), digest_size=32)
    for name in body.__struct_fields__:
        value = getattr(body, name)
        part = value if isinstance(value, bytes) else repr(value).encode(errors="surrogatepass")
        digest.update(b"%b %d " % (name.encode(), len(part)))
        digest.update(part)
    return digest.digest()
