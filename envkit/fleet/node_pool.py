"""The sandboxes of a node, a machine whose sandboxes one gateway orders: starts, keeps and ends them, and nothing else.

Queue, warm sandboxes, heartbeats and restarts are the gateway's. A sandbox ends with this pool. It also ends if no
caller has used it for its time-to-live, so that it does not outlive its gateway for long. The gateway's open WebSocket
counts as a use.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Self

import anyio

from envkit import clock
from envkit.errors import CapacityError, SandboxConflictError, SandboxLostError, SandboxNotFoundError, UnsupportedError
from envkit.protocols import Sandbox, SandboxBackend, SandboxPool
from envkit.types import Cause, CauseKind, Phase, SandboxSpec, SandboxState, SandboxView, TenantKey

_log = logging.getLogger(__name__)

NAME = "node"
"""Name of the only node of this pool, in views and in the names of snapshots."""

_SWEEP_S = 1.0
_STOP_S = 15.0
_KEEP_S = 600.0
"""Seconds for which the cause of an end is kept."""


@dataclass(slots=True, eq=False)
class _Held:
    """A sandbox of the pool.

    `sandbox` is None before its start and after its end. `cause` says why it ended, None while it runs. `is_free` says
    that it was stopped, so that its id can be used again.
    """

    spec: SandboxSpec
    snapshot: str | None
    ttl_s: float | None
    phases: tuple[Phase, ...]
    sandbox: Sandbox | None = None
    backend_id: str = ""
    is_free: bool = False
    used_at: float = field(default_factory=clock.now)
    ended_at: float = 0.0
    cause: Cause | None = None
    gone: anyio.Event = field(default_factory=anyio.Event)
    cleared: anyio.Event = field(default_factory=anyio.Event)

    def end(self, state: SandboxState, cause: Cause) -> None:
        if self.cause is None:
            self.cause, self.ended_at = cause, clock.now()
            self.phases = (*self.phases, Phase(state, clock.wall(), str(cause), cause))
            self.gone.set()


class NodePool(SandboxPool):
    """The sandboxes of a node. Use it with ``async with``; the end of the block stops them all.

    Args:
        backend: Starts the sandboxes; the caller opens and closes it.
    """

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend
        self._held: dict[TenantKey, _Held] = {}

    def lease(
        self, spec: SandboxSpec, *, tenant: str = "", wait_s: float = 60.0, snapshot: str | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        raise UnsupportedError("a node leases no sandboxes; ask its gateway")

    async def create(
        self,
        id: str,
        spec: SandboxSpec,
        *,
        tenant: str = "",
        ttl_s: float | None = None,
        snapshot: str | None = None,
        wait_s: float | None = None,
    ) -> SandboxView:
        """Start a sandbox, whatever runs already: the gateway knows the node's capacity."""
        key = TenantKey(tenant, id)
        held = self._held.get(key)
        if held is not None and not held.is_free:
            if (held.spec, held.snapshot) != (spec, snapshot):
                raise SandboxConflictError(f"{id!r} is taken by a sandbox with another spec; choose another id")
            return self._view(key, held)
        began = (Phase(SandboxState.STARTING, clock.wall(), "starts"),)
        held = self._held[key] = _Held(spec, snapshot, ttl_s, began)
        try:
            if snapshot is None:
                held.sandbox = await self._backend.start(spec)
            else:
                held.sandbox = await self._backend.restore(snapshot, spec)
        except BaseException:
            del self._held[key]
            raise
        held.used_at, held.backend_id = clock.now(), held.sandbox.id
        held.phases = (*began, Phase(SandboxState.LEASED, clock.wall(), "started"))
        self._tasks.start_soon(self._live, held, held.sandbox)
        return self._view(key, held)

    async def snapshot_bytes(self, snapshot: str) -> int:
        return await self._backend.snapshot_bytes(snapshot)

    async def remove_snapshot(self, snapshot: str) -> None:
        await self._backend.remove_snapshot(snapshot)

    def get(self, id: str, *, tenant: str = "") -> Sandbox:
        held = self._find(TenantKey(tenant, id))
        if held.cause is not None:
            raise SandboxLostError(id, held.cause)
        if held.sandbox is None:
            raise CapacityError(f"sandbox {id!r} is still starting; retry later")
        held.used_at = clock.now()
        return held.sandbox

    def view(self, id: str, *, tenant: str = "") -> SandboxView:
        key = TenantKey(tenant, id)
        return self._view(key, self._find(key))

    def views(self, *, tenant: str | None = None) -> Sequence[SandboxView]:
        return [self._view(key, held) for key, held in self._held.items() if tenant in (None, key.tenant)]

    async def stop(self, id: str, *, tenant: str = "") -> None:
        held = self._held.get(TenantKey(tenant, id))
        if held is not None and held.backend_id:
            held.end(SandboxState.STOPPED, Cause(CauseKind.STOPPED, "stopped"))
            await held.cleared.wait()
            held.is_free = True

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._sweep)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await clock.end_tasks(self._tasks, error)

    async def _live(self, held: _Held, sandbox: Sandbox) -> None:
        """Wait for the end of a sandbox, and remove what is left of it."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._await_end, held, sandbox)
                await held.gone.wait()
                tasks.cancel_scope.cancel()
        finally:
            held.end(SandboxState.STOPPED, Cause(CauseKind.STOPPED, "the node was stopped"))
            with anyio.move_on_after(_STOP_S, shield=True):
                try:
                    await sandbox.stop()
                except Exception as error:  # it must end only this sandbox, not the node
                    _log.error("sandbox %s may be left behind: %s", sandbox.id, error)
            held.sandbox = None
            held.cleared.set()

    async def _await_end(self, held: _Held, sandbox: Sandbox) -> None:
        try:
            cause = await sandbox.wait()
        except Exception as error:  # it must end only this sandbox, not the node
            cause = Cause(CauseKind.UNKNOWN, f"{type(error).__name__}: {error}")
        held.end(SandboxState.LOST, cause)

    async def _sweep(self) -> None:
        """End sandboxes that nobody uses any more, and forget those that ended long ago."""
        while True:
            await anyio.sleep(_SWEEP_S)
            now = clock.now()
            for key, held in list(self._held.items()):
                if held.cause is not None:
                    if now - held.ended_at >= _KEEP_S and held.cleared.is_set():
                        del self._held[key]
                elif held.sandbox is not None and held.ttl_s is not None and now - held.used_at >= held.ttl_s:
                    why = f"no gateway used it for {held.ttl_s:g} s"
                    held.end(SandboxState.STOPPED, Cause(CauseKind.ORPHANED, why))

    def _find(self, key: TenantKey) -> _Held:
        held = self._held.get(key)
        if held is None:
            raise SandboxNotFoundError(f"there is no sandbox {key.id!r} on this node")
        return held

    def _view(self, key: TenantKey, held: _Held) -> SandboxView:
        return SandboxView(key.id, held.backend_id, NAME, key.tenant, held.spec, held.phases)
