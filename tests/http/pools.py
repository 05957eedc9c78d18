"""A minimal pool over one backend: named leases and ended sandboxes, without expiry or restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from envkit import clock
from envkit.errors import SandboxConflictError, SandboxLostError, SandboxNotFoundError
from envkit.protocols import Sandbox, SandboxBackend
from envkit.types import CauseKind, Phase, PoolEvent, SandboxSpec, SandboxState, SandboxView, TenantKey
from tests.causes import cause


class SmallPool:
    def __init__(self, backend: SandboxBackend) -> None:
        self.asked: list[str] = []
        self._backend = backend
        self._views: dict[TenantKey, SandboxView] = {}
        self._sandboxes: dict[TenantKey, Sandbox] = {}
        self._free: set[TenantKey] = set()
        self._happened: list[PoolEvent] = []
        self._news = anyio.Event()

    @asynccontextmanager
    async def lease(
        self, spec: SandboxSpec, *, tenant: str = "", wait_s: float = 60.0, snapshot: str | None = None
    ) -> AsyncIterator[Sandbox]:
        id = f"lease-{len(self._views)}"
        await self.create(id, spec, tenant=tenant, snapshot=snapshot)
        try:
            yield self.get(id, tenant=tenant)
        finally:
            await self.stop(id, tenant=tenant)

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
        key = TenantKey(tenant, id)
        if key not in self._views or key in self._free:
            self._free.discard(key)
            self._views[key] = SandboxView(id, "", "here", tenant, spec, ())
            self._enter(key, SandboxState.STARTING, "requested")
            try:
                start = self._backend.start(spec) if snapshot is None else self._backend.restore(snapshot, spec)
                self._sandboxes[key] = sandbox = await start
            except BaseException as error:
                self._enter(key, SandboxState.STOPPED, str(error) or "cancelled")
                self._free.add(key)
                raise
            self._views[key] = replace(self._views[key], backend_id=sandbox.id)
            self._enter(key, SandboxState.LEASED, "it answers")
        elif self._views[key].spec != spec:
            raise SandboxConflictError(f"sandbox {id} has another spec")
        return self._views[key]

    async def snapshot_bytes(self, snapshot: str) -> int:
        return await self._backend.snapshot_bytes(snapshot)

    async def remove_snapshot(self, snapshot: str) -> None:
        await self._backend.remove_snapshot(snapshot)

    def get(self, id: str, *, tenant: str = "") -> Sandbox:
        self.asked.append(id)
        view = self.view(id, tenant=tenant)
        if view.state is SandboxState.STOPPED:
            why = view.phases[-1].cause
            assert why is not None
            raise SandboxLostError(id, why)
        return self._sandboxes[view.key]

    def view(self, id: str, *, tenant: str = "") -> SandboxView:
        view = self._views.get(TenantKey(tenant, id))
        if view is None:
            raise SandboxNotFoundError(f"there is no sandbox {id}")
        return view

    def views(self, *, tenant: str | None = None) -> Sequence[SandboxView]:
        return [view for view in self._views.values() if tenant in (None, view.tenant)]

    async def stop(self, id: str, *, tenant: str = "") -> None:
        key = TenantKey(tenant, id)
        if (sandbox := self._sandboxes.get(key)) is not None:
            await sandbox.stop()
            self._free.add(key)
            if self._views[key].state is not SandboxState.LOST:
                self._enter(key, SandboxState.STOPPED, "stopped")

    def lose(self, id: str, reason: str) -> None:
        self._enter(TenantKey("", id), SandboxState.LOST, reason)

    async def events(self, *, after: int = 0) -> AsyncIterator[PoolEvent]:
        while True:
            for event in self._happened[after:]:
                yield event
                after = event.number
            await self._news.wait()

    def _enter(self, key: TenantKey, state: SandboxState, reason: str) -> None:
        view = self._views[key]
        why = None
        if state is SandboxState.STOPPED:
            why = cause(reason, CauseKind.STOPPED)
        elif state is SandboxState.LOST:
            why = cause(reason)
        self._views[key] = view = replace(view, phases=(*view.phases, Phase(state, clock.wall(), reason, why)))
        number = len(self._happened) + 1
        self._happened.append(PoolEvent(number, clock.wall(), "state", view.id, view.tenant, reason, state, why))
        news, self._news = self._news, anyio.Event()
        news.set()
