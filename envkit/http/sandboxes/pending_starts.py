"""Sandbox starts in progress, which callers may repeat."""

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
    """Starts sandboxes. A caller may disconnect during the start and repeat the request.

    Args:
        pool: Creates them.
        on_new: Called with the id of each sandbox that is new to the pool.
        ttl_s: Limit on the idle time after which a sandbox is stopped, seconds.
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
        """Whether a sandbox of this id is being started."""
        start = self._starts.get(id)
        return start is not None and not start.done.is_set()

    async def run(self, request: StartRequest) -> None:
        """Start a sandbox, or wait for the same start in progress.

                If the start fails, all calls that wait for it raise the error; if no call waits, the next call raises
                it.
        Raises as `SandboxPool.create` does.
        """
        start = self._starts.get(request.id)
        if start is None or start.request != request:  # the request may differ; then the pool rejects it
            start = self._begin(request)
        await start.done.wait()
        if self._starts.get(request.id) is start:
            del self._starts[request.id]
        if start.error is not None:
            raise start.error.with_traceback(None)

    async def cancel(self, id: str, owner: str | None) -> None:
        """Cancel a start in progress if it belongs to the tenant `owner`; None means any tenant."""
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
