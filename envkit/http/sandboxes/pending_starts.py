"""Sandboxes that are being started for somebody who may ask again."""

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

_UNTOLD_S = 600.0

MAX_WAITING = 256
"""Starts of one tenant that are under way from which on a further one does not wait for room."""


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What somebody wants to be started; see `envkit.protocols.SandboxPool.create`."""

    id: str
    spec: SandboxSpec
    tenant: str
    ttl_s: float | None
    snapshot: str | None
    wait_s: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class _PendingStart:
    order: StartRequest
    done: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    error: Exception | None = None
    ended_at: float = 0.0


class PendingStarts:
    """Starts sandboxes; callers may go away meanwhile and ask again.

    Args:
        pool: Where they are started.
        on_new: Told the name of each that is new to the pool.
        ttl_s: Seconds without use after which one is stopped, where less is not asked for.
    """

    def __init__(self, pool: SandboxPool, on_new: Callable[[str], None], *, ttl_s: float | None = None) -> None:
        self.tasks: TaskGroup | None = None
        """Where they are started, since that outlives those who ask; None while the server is not running."""
        self._pool = pool
        self._on_new = on_new
        self._ttl_s = ttl_s
        self._starts: dict[str, _PendingStart] = {}
        self._under_way: Counter[str] = Counter()

    def __contains__(self, id: str) -> bool:
        """Say whether a sandbox of this name is being started."""
        start = self._starts.get(id)
        return start is not None and not start.done.is_set()

    async def run(self, order: StartRequest) -> None:
        """Start what is ordered, or wait for it where that goes on.

        What fails is raised by the call of whoever waits for it, or else of the next who asks. Raises as
        `SandboxPool.create`.
        """
        start = self._starts.get(order.id)
        if start is None or start.order != order:  # where it is another, the pool says what is to be said
            start = self._begin(order)
        await start.done.wait()
        if self._starts.get(order.id) is start:
            del self._starts[order.id]
        if start.error is not None:
            raise start.error.with_traceback(None)

    async def cancel(self, id: str, seen: str | None) -> None:
        """End a start that goes on, if it is of the tenant `seen`; None is any."""
        start = self._starts.get(id)
        if start is not None and seen in (None, start.order.tenant):
            start.scope.cancel()
            await start.done.wait()
            self._starts.pop(id, None)

    def _begin(self, order: StartRequest) -> _PendingStart:
        try:
            self._pool.view(order.id)
        except SandboxNotFoundError:
            self._on_new(order.id)
        untold_s = clock.now() - _UNTOLD_S
        for id, one in list(self._starts.items()):
            if one.done.is_set() and one.ended_at < untold_s:
                del self._starts[id]
        start = _PendingStart(order)
        self._starts.setdefault(order.id, start)
        assert self.tasks is not None
        self.tasks.start_soon(self._run, start)
        return start

    async def _run(self, start: _PendingStart) -> None:
        order = start.order
        wait_s = order.wait_s if order.wait_s and self._under_way[order.tenant] < MAX_WAITING else None
        self._under_way[order.tenant] += 1
        start.error = SandboxNotFoundError(f"sandbox {order.id} was stopped while it was started")
        try:
            with start.scope:
                ttl_s = min((one for one in (order.ttl_s, self._ttl_s) if one is not None), default=None)
                await self._pool.create(
                    order.id, order.spec, tenant=order.tenant, ttl_s=ttl_s, snapshot=order.snapshot, wait_s=wait_s
                )
                start.error = None
        except Exception as error:
            start.error = error
        finally:
            self._under_way -= Counter({order.tenant: 1})
            start.ended_at = clock.now()
            start.done.set()
