"""Shared by the tests of pools: a pool over scripted sandboxes on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from envkit import clock
from envkit.restarts import RestartBudget
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.event_log import LedgerStore
from envkit.sandbox.pool.health import LivenessTimes
from envkit.sandbox.pool.node import Capacity, Node
from envkit.sandbox.pool.warm_stock import WarmSpec
from envkit.types import PoolEvent, SandboxSpec, SandboxState, SandboxView, TenantKey
from tests.sandbox.fake.backend import FakeBackend, Fate

SPEC = SandboxSpec()


class FakeLedger:
    """A ledger in memory that takes `save_s` for a write and fails while it is full."""

    def __init__(self, save_s: float = 0.01) -> None:
        self.id = "ledger"
        self.save_s = save_s
        self.views: dict[TenantKey, SandboxView] = {}
        self.order: list[tuple[str, SandboxState]] = []
        self.is_full = False

    async def save(self, view: SandboxView) -> None:
        await anyio.sleep(self.save_s)
        if self.is_full:
            raise OSError("no space left on device")
        self.views[view.key] = view
        self.order.append((view.id, view.state))

    def load(self) -> Sequence[SandboxView]:
        return list(self.views.values())


def run(main: Callable[[], Awaitable[object]]) -> None:
    clock.run(main, virtual=True)


@asynccontextmanager
async def opened(
    *fates: Fate,
    sandboxes: int | None = None,
    stocks: Sequence[WarmSpec] = (),
    max_per_tenant: int | None = None,
    share: float = 1.0,
    liveness_times: LivenessTimes | None = None,
    restarts: RestartBudget | None = None,
    ledger: LedgerStore | None = None,
) -> AsyncIterator[tuple[Pool, FakeBackend]]:
    """Open a pool of one node. Sandbox number n has the n-th fate, or the last one."""

    def fate(number: int, rng: object) -> Fate:
        return fates[min(number, len(fates) - 1)] if fates else Fate()

    async with FakeBackend(fate) as backend:
        node = Node("here", backend, Capacity(sandboxes=sandboxes))
        pool = Pool(
            [node],
            stocks=stocks,
            max_per_tenant=max_per_tenant,
            share=share,
            liveness_times=liveness_times,
            restarts=restarts,
            ledger=ledger,
        )
        async with pool:
            yield pool, backend


def states(view: SandboxView) -> list[SandboxState]:
    return [phase.state for phase in view.phases]


async def past_events(pool: Pool) -> list[PoolEvent]:
    """Return all events until now."""
    found: list[PoolEvent] = []

    async def read() -> None:
        async for event in pool.events():
            found.append(event)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    return found


async def borrow(pool: Pool, spec: SandboxSpec = SPEC, tenant: str = "", wait_s: float = 10_000) -> None:
    """Lease a sandbox and release it at once."""
    async with pool.lease(spec, tenant=tenant, wait_s=wait_s):
        pass
