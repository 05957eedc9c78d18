"""Starts of sandboxes that are in progress. A caller can repeat its request and then waits for the same start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from envkit import clock
from envkit.errors import SandboxNotFoundError
from envkit.protocols import SandboxPool
from envkit.types import SandboxSpec

_RESULT_TTL_S = 600.0

MAX_WAITING = 256
"""Maximum number of a tenant's starts that wait for capacity; a further start fails immediately."""


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A request to start a sandbox; see `envkit.protocols.SandboxPool.create`."""

    id: str
    spec: SandboxSpec
    tenant: str
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

    Args:
        pool: Creates the sandboxes.
        on_new: Called with the id of a sandbox before its start, unless the pool already knows the id.
        ttl_s: Maximum seconds without use after which a sandbox is stopped; None for no maximum.
    """

    def __init__(self, pool: SandboxPool, on_new: Callable[[str], None], *, ttl_s: float | None = None) -> None:
        self.tasks: TaskGroup | None = None
        """Runs the starts, which outlive their callers; None while the server is not running."""
        self._pool = pool
        self._on_new = on_new
        self._ttl_s = ttl_s
        self._starts: dict[str, _PendingStart] = {}
        self._in_progress: Counter[str] = Counter()

    def __contains__(self, id: str) -> bool:
        """Return whether the start of a sandbox with this id is in progress."""
        start = self._starts.get(id)
        return start is not None and not start.done.is_set()

    async def run(self, request: StartRequest) -> None:
        """Start a sandbox. If the same request is already in progress, wait for that start instead.

        If the start fails, all callers that wait for it get the error. If no caller waits, the next call with the same
        request gets the error. The errors are those of `SandboxPool.create`.
        """
        start = self._starts.get(request.id)
        # If another start has the same id but a different request, begin this start too: the pool then rejects it.
        if start is None or start.request != request:
            start = self._begin(request)
        await start.done.wait()
        if self._starts.get(request.id) is start:
            del self._starts[request.id]
        if start.error is not None:
            raise start.error.with_traceback(None)

    async def cancel(self, id: str, owner: str | None) -> None:
        """Cancel the start of a sandbox, if one is in progress and belongs to the tenant `owner`; None means any
        tenant.
        """
        start = self._starts.get(id)
        if start is not None and owner in (None, start.request.tenant):
            start.scope.cancel()
            await start.done.wait()
            self._starts.pop(id, None)

    def _begin(self, request: StartRequest) -> _PendingStart:
        try:
            self._pool.view(request.id)
        except SandboxNotFoundError:
            self._on_new(request.id)
        expired_s = clock.now() - _RESULT_TTL_S
        for id, one in list(self._starts.items()):
            if one.done.is_set() and one.ended_at < expired_s:
                del self._starts[id]
        start = _PendingStart(request)
        self._starts.setdefault(request.id, start)
        assert self.tasks is not None
        self.tasks.start_soon(self._run, start)
        return start

    async def _run(self, start: _PendingStart) -> None:
        new = start.request
        wait_s = new.wait_s if new.wait_s and self._in_progress[new.tenant] < MAX_WAITING else None
        self._in_progress[new.tenant] += 1
        start.error = SandboxNotFoundError(f"sandbox {new.id} was stopped during its start")
        try:
            with start.scope:
                ttl_s = min((one for one in (new.ttl_s, self._ttl_s) if one is not None), default=None)
                await self._pool.create(
                    new.id, new.spec, tenant=new.tenant, ttl_s=ttl_s, snapshot=new.snapshot, wait_s=wait_s
                )
                start.error = None
        except Exception as error:
            start.error = error
        finally:
            self._in_progress -= Counter({new.tenant: 1})
            start.ended_at = clock.now()
            start.done.set()
