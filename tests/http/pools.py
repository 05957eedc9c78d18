"""A minimal pool over one backend: named leases and ended sandboxes, without expiry or restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from envkit import clock
from envkit.errors import SandboxConflictError, SandboxLostError, SandboxNotFoundError
from envkit.protocols import Sandbox, SandboxBackend
from envkit.types import CauseKind, Phase, PoolEvent, SandboxSpec, SandboxState, SandboxView
from tests.causes import cause


class SmallPool:
    def __init__(self, backend: SandboxBackend) -> None:
        self.asked: list[str] = []
        self._backend = backend
        self._views: dict[str, SandboxView] = {}
        self._sandboxes: dict[str, Sandbox] = {}
        self._free: set[str] = set()
        self._happened: list[PoolEvent] = []
        self._news = anyio.Event()

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec, *, tenant: str = "", wait_s: float = 60.0) -> AsyncIterator[Sandbox]:
        id = f"lease-{len(self._views)}"
        await self.create(id, spec, tenant=tenant)
        try:
            yield self.get(id)
        finally:
            await self.stop(id)

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
        if id not in self._views or id in self._free:
            self._free.discard(id)
            self._views[id] = SandboxView(id, "", "here", tenant, spec, ())
            self._enter(id, SandboxState.STARTING, "requested")
            try:
                start = self._backend.start(spec) if snapshot is None else self._backend.restore(snapshot, spec)
                self._sandboxes[id] = sandbox = await start
            except BaseException as error:
                self._enter(id, SandboxState.STOPPED, str(error) or "cancelled")
                self._free.add(id)
                raise
            self._views[id] = replace(self._views[id], backend_id=sandbox.id)
            self._enter(id, SandboxState.LEASED, "it answers")
        elif (self._views[id].spec, self._views[id].tenant) != (spec, tenant):
            raise SandboxConflictError(f"sandbox {id} has another spec")
        return self._views[id]

    async def snapshot_bytes(self, snapshot: str) -> int:
        return await self._backend.snapshot_bytes(snapshot)

    async def remove_snapshot(self, snapshot: str) -> None:
        await self._backend.remove_snapshot(snapshot)

    def get(self, id: str, *, tenant: str | None = None) -> Sandbox:
        self.asked.append(id)
        view = self.view(id, tenant=tenant)
        if view.state is SandboxState.STOPPED:
            why = view.phases[-1].cause
            assert why is not None
            raise SandboxLostError(view.backend_id, why)
        return self._sandboxes[id]

    def view(self, id: str, *, tenant: str | None = None) -> SandboxView:
        view = self._views.get(id)
        if view is None or tenant not in (None, view.tenant):
            raise SandboxNotFoundError(f"there is no sandbox {id}")
        return view

    def views(self, *, tenant: str | None = None) -> Sequence[SandboxView]:
        return [view for view in self._views.values() if tenant in (None, view.tenant)]

    async def stop(self, id: str, *, tenant: str | None = None) -> None:
        sandbox = self._sandboxes.get(id)
        if sandbox is not None and tenant in (None, self._views[id].tenant):
            await sandbox.stop()
            self._free.add(id)
            if self._views[id].state is not SandboxState.LOST:
                self._enter(id, SandboxState.STOPPED, "stopped")

    def lose(self, id: str, reason: str) -> None:
        self._enter(id, SandboxState.LOST, reason)

    async def events(self, *, after: int = 0) -> AsyncIterator[PoolEvent]:
        while True:
            for event in self._happened[after:]:
                yield event
                after = event.number
            await self._news.wait()

    def _enter(self, id: str, state: SandboxState, reason: str) -> None:
        view = self._views[id]
        why = None
        if state is SandboxState.STOPPED:
            why = cause(reason, CauseKind.STOPPED)
        elif state is SandboxState.LOST:
            why = cause(reason)
        self._views[id] = view = replace(view, phases=(*view.phases, Phase(state, clock.wall(), reason, why)))
        number = len(self._happened) + 1
        self._happened.append(PoolEvent(number, clock.wall(), "state", id, view.tenant, reason, state, why))
        news, self._news = self._news, anyio.Event()
        news.set()
