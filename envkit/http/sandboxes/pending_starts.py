"""Starts of sandboxes that are in progress. A caller that repeats its request waits for the same start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from envkit import clock
from envkit.errors import SandboxNotFoundError, UnreachableError
from envkit.protocols import SandboxPool
from envkit.types import SandboxSpec, TenantKey

_RESULT_TTL_S = 600.0

MAX_WAITING = 256
"""Maximum number of a tenant's starts that wait for capacity. Without capacity, further starts fail immediately."""


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A request to start a sandbox; see `envkit.protocols.SandboxPool.create`."""

    key: TenantKey
    spec: SandboxSpec
    ttl_s: float | None
    snapshot: str | None
    wait_s: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class _PendingStart:
    request: StartRequest
    done: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    error: Exception | None = None
    ended_at: float = 0.0


class PendingStarts:
    """Starts sandboxes. A caller can disconnect during a start and repeat its request later.

    `on_new` is called with the key of a sandbox before it starts, unless the pool already knows the key. `ttl_s` is the
    maximum of the seconds without use after which a sandbox is stopped; None for no maximum.
    """

    def __init__(self, pool: SandboxPool, on_new: Callable[[TenantKey], None], *, ttl_s: float | None = None) -> None:
        self.tasks: TaskGroup | None = None
        """Runs the starts, which outlive their callers; None while the server is not running."""
        self.is_draining = False
        """Whether new sandboxes are refused, because the server will shut down."""
        self._pool = pool
        self._on_new = on_new
        self._ttl_s = ttl_s
        self._starts: dict[TenantKey, _PendingStart] = {}
        self._in_progress: Counter[str] = Counter()

    def __contains__(self, key: TenantKey) -> bool:
        """Return whether the start of a sandbox with this key is in progress."""
        start = self._starts.get(key)
        return start is not None and not start.done.is_set()

    async def run(self, request: StartRequest) -> None:
        """Start a sandbox. If the same request is already in progress, wait for that start instead.

        If the start fails, all callers that wait for it get the error. If no caller waits, the next call with the same
        request gets the error. The errors are those of `SandboxPool.create`.
        """
        start = self._starts.get(request.key)
        # If a different request has the same key, begin this one too, so that the pool rejects it.
        if start is None or start.request != request:
            start = self._begin(request)
        await start.done.wait()
        if self._starts.get(request.key) is start:
            del self._starts[request.key]
        if start.error is not None:
            raise start.error.with_traceback(None)

    async def cancel(self, key: TenantKey) -> None:
        """Cancel the start of a sandbox, if one is in progress."""
        if (start := self._starts.get(key)) is not None:
            start.scope.cancel()
            await start.done.wait()
            self._starts.pop(key, None)

    def _begin(self, request: StartRequest) -> _PendingStart:
        try:
            self._pool.view(request.key.id, tenant=request.key.tenant)
        except SandboxNotFoundError:
            if self.is_draining:
                raise UnreachableError("the server is shutting down and starts no sandboxes; retry later") from None
            self._on_new(request.key)
        expired_s = clock.now() - _RESULT_TTL_S
        for key, one in list(self._starts.items()):
            if one.done.is_set() and one.ended_at < expired_s:
                del self._starts[key]
        start = _PendingStart(request)
        self._starts.setdefault(request.key, start)
        assert self.tasks is not None
        self.tasks.start_soon(self._run, start)
        return start

    async def _run(self, start: _PendingStart) -> None:
        new, (tenant, id) = start.request, start.request.key
        wait_s = new.wait_s if new.wait_s and self._in_progress[tenant] < MAX_WAITING else None
        self._in_progress[tenant] += 1
        start.error = SandboxNotFoundError(f"sandbox {id} was stopped during its start")
        try:
            with start.scope:
                ttl_s = min((one for one in (new.ttl_s, self._ttl_s) if one is not None), default=None)
                await self._pool.create(id, new.spec, tenant=tenant, ttl_s=ttl_s, snapshot=new.snapshot, wait_s=wait_s)
                start.error = None
        except Exception as error:
            start.error = error
        finally:
            self._in_progress -= Counter({tenant: 1})
            start.ended_at = clock.now()
            start.done.set()
