"""Sandbox pool: leases sandboxes on any number of nodes, keeps warm sandboxes ready, and monitors liveness.

For each sandbox, one task runs from the sandbox's start until its removal. When a leased sandbox is lost, all calls to
it fail at once. The pool replaces lost warm sandboxes, but not leased ones: only their users know what was in them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Self

import anyio

from envkit import clock
from envkit.errors import (
    CapacityError,
    LeaseNotPersistedError,
    SandboxConflictError,
    SandboxLostError,
    SandboxNotFoundError,
)
from envkit.protocols import Sandbox, ServerPool
from envkit.restarts import Replacement, RestartBudget
from envkit.types import Cause, CauseKind, PoolEvent, SandboxSpec, SandboxState, SandboxView, TenantKey

from . import reattach
from .event_log import EventLog, LedgerStore, LedgerWriter, PoolCounts
from .health import CLOSED, LivenessTimes, declare_lost, is_silent
from .instance import GIVEN_UP, STOPPED, Instance, ended, is_over
from .lease import Lease
from .node import Node, ResourceRequest, usable, why_impossible
from .queue import LeaseRequest
from .scheduler import Scheduler
from .warm_stock import WarmSpec, WarmStock

__all__ = ["Pool"]

_OWN_NAME = re.compile(r"pool-(\d+)")
_LAST_WRITES_S = 10.0


class Pool(ServerPool):
    """Leases sandboxes; implements `envkit.protocols.ServerPool`. Use it with ``async with``.

    Entering the block re-attaches to the running sandboxes that the ledger records, and begins to start warm sandboxes.
    Leaving the block stops all sandboxes concurrently, with a timeout of 15 s each.

    Args:
        nodes: Nodes at the beginning. Their backends must stay open until the pool is closed.
        stocks: Which warm sandboxes to keep ready, and how many.
        max_per_tenant: Maximum number of concurrent sandboxes per tenant; None means no limit. Sandboxes of tenant
            ``""`` whose id is generated or starts with a colon belong to the pool's own process and do not count.
        share: Fraction, in (0, 1], of the total capacity of all nodes that one tenant may use. A tenant may always have
            one sandbox, whatever its size. The limit does not apply to tenant ``""``.
        liveness_times: Intervals and timeouts of liveness probes; None means the defaults of `LivenessTimes`.
        restarts: Limit on the restarts of each warm stock, and of each subject of `failed`; None means 20 in 10
            minutes.
        ledger: Store that records the sandboxes. If this process is killed, they keep running, and the next pool with
            this ledger re-attaches to them. With None, they end with this process.
        views: Read-only mounts of every sandbox of `lease`, besides those of its spec; see `SandboxSpec.views`.
    """

    def __init__(
        self,
        nodes: Sequence[Node] = (),
        *,
        stocks: Sequence[WarmSpec] = (),
        max_per_tenant: int | None = None,
        share: float = 1.0,
        liveness_times: LivenessTimes | None = None,
        restarts: RestartBudget | None = None,
        ledger: LedgerStore | None = None,
        views: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._views = tuple(views)
        self._liveness_times = liveness_times or LivenessTimes()
        self._ledger = ledger
        self._history = EventLog(ledger)
        self._scheduler = Scheduler(
            stocks=[WarmStock(warm_spec) for warm_spec in stocks],
            history=self._history,
            max_per_tenant=max_per_tenant,
            share=share,
            liveness_times=self._liveness_times,
            budget=restarts or RestartBudget(restarts=20),
            ledger_id=None if ledger is None else ledger.id,
        )
        self._creating: dict[TenantKey, anyio.Event] = {}
        self._is_open = False
        for node in nodes:
            self.add_node(node)

    @asynccontextmanager
    async def lease(
        self, spec: SandboxSpec, *, tenant: str = "", wait_s: float = 60.0, snapshot: str | None = None
    ) -> AsyncIterator[Sandbox]:
        spec = replace(spec, views=(*spec.views, *self._views))
        request = LeaseRequest(spec, ResourceRequest.of(spec), tenant, snapshot=_parsed(snapshot))
        instance = await self._scheduler.take(request, wait_s)
        try:
            yield Lease(instance)
        finally:
            instance.end(Cause(CauseKind.STOPPED, "released"))
            with anyio.CancelScope(shield=True):
                await instance.cleared.wait()

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
        if not id or _OWN_NAME.fullmatch(id):
            raise SandboxConflictError(f"{id!r} is not a valid id: it is empty or reserved (pool-N); choose another id")
        key = TenantKey(tenant, id)
        while (pending := self._pending(key)) is not None:
            await pending.wait()
        self._history.past.take_key(key)
        known = self._find(key)
        files = _parsed(snapshot)
        if known is not None:
            if known.spec != spec:
                raise SandboxConflictError(f"{id!r} is taken by a sandbox with another spec; choose another id")
            instance = self._scheduler.instances.get(key)
            if instance is not None and instance.files != files:
                raise SandboxConflictError(f"{id!r} is taken by a sandbox from another snapshot; choose another id")
            return known
        created = self._creating[key] = anyio.Event()
        try:
            instance = await self._scheduler.take(
                LeaseRequest(spec, ResourceRequest.of(spec), tenant, id, ttl_s, files), wait_s
            )
            if self._history.ledger_writer is not None:
                await self._persist(instance, self._history.ledger_writer)
            return instance.view()
        finally:
            del self._creating[key]
            created.set()

    async def snapshot_bytes(self, snapshot: str) -> int:
        node, _, name = snapshot.partition("/")
        found = self._scheduler.nodes.get(node)
        return 0 if found is None else await found.backend.snapshot_bytes(name)

    async def remove_snapshot(self, snapshot: str) -> None:
        node, _, name = snapshot.partition("/")
        if (found := self._scheduler.nodes.get(node)) is not None:
            await found.backend.remove_snapshot(name)

    def get(self, id: str, *, tenant: str = "") -> Sandbox:
        """Return a sandbox by its id; see `envkit.protocols.SandboxPool.get`.

        Raises:
            CapacityError: The sandbox is still starting.
        """
        instance = self._scheduler.instances.get(TenantKey(tenant, id))
        if instance is None or instance.is_over:
            cause = self.view(id, tenant=tenant).phases[-1].cause
            assert cause is not None, "an ended sandbox has a cause"
            raise SandboxLostError(id, cause)
        if not instance.is_leased:
            raise _unknown(id)
        if not instance.settled.is_set():
            raise CapacityError(f"sandbox {id} is still starting; retry later")
        instance.used_at = clock.now()
        return Lease(instance)

    def watch(self, id: str, check: Callable[[float], Awaitable[None]], on_end: Callable[[Cause], None]) -> None:
        self.get(id)  # raises an error if it has ended
        instance = self._scheduler.instances[TenantKey("", id)]
        instance.check, instance.on_end = check, on_end

    def lose(self, id: str, cause: Cause) -> None:
        if (instance := self._scheduler.instances.get(TenantKey("", id))) is not None:
            instance.lose(cause)

    def failed(self, subject: Hashable, name: str, cause: object, *, excuse: anyio.Event | None = None) -> Replacement:
        return self._scheduler.failed(subject, name, cause, excuse=excuse)

    def view(self, id: str, *, tenant: str = "") -> SandboxView:
        """Return a sandbox's view without renewing its lease. Views of ended sandboxes are kept for 10 minutes."""
        found = self._find(TenantKey(tenant, id))
        if found is None:
            raise _unknown(id)
        return found

    def views(self, *, tenant: str | None = None) -> Sequence[SandboxView]:
        """Return the views of a tenant's live and recently ended sandboxes, oldest first; None means all tenants."""
        found = [*self._history.past.all(), *(instance.view() for instance in self._scheduler.instances.values())]
        seen = (view for view in found if tenant in (None, view.tenant))
        return sorted(seen, key=lambda view: view.phases[0].at_s)

    async def stop(self, id: str, *, tenant: str = "") -> None:
        key = TenantKey(tenant, id)
        if (instance := self._scheduler.instances.get(key)) is not None:
            instance.end(STOPPED)
            await instance.cleared.wait()
        self._history.past.free(key)

    def events(self) -> AsyncIterator[PoolEvent]:
        """Yield the stored events, then each new event when it happens.

        The pool stores the last 10,000 events. A reader that falls further behind misses events: their numbers have a
        gap. The kinds of events are ``"state"``, ``"stock"``, ``"ledger"``, those given to `alert`, and, at most once a
        minute per sandbox or warm stock, ``"memory"``, ``"disk"``, ``"probe"``, ``"restarts"`` and ``"stop"``. The
        iteration ends when the pool is closed.
        """
        return self._history.events.since(0)

    def alert(self, kind: str, text: str) -> None:
        self._history.alert(kind, None, text)

    def add_node(self, node: Node) -> None:
        """Add a node, and remove orphans from it: sandboxes of this pool's ledger that the pool does not know.

        Raises:
            ValueError: The pool already has a node with this name.
        """
        if node.name in self._scheduler.nodes:
            raise ValueError(f"a node named {node.name!r} already exists")
        self._scheduler.nodes[node.name] = node
        if self._is_open:
            self._clear(node)
        self._scheduler.serve()

    def remove_node(self, name: str, cause: Cause) -> None:
        """Remove a node, and declare all its sandboxes lost with the cause `cause`. Idempotent."""
        node = self._scheduler.nodes.pop(name, None)
        if node is not None:
            self._scheduler.last_gone = str(cause)
        for instance in list(self._scheduler.instances.values()):
            if instance.node is node:
                instance.lose(cause)
        self._scheduler.refuse()
        self._scheduler.serve()

    def drain_node(self, name: str, *, drains: bool) -> bool:
        """Start no more sandboxes on a node, and stop its warm sandboxes; or use it again, if `drains` is false.

        Returns:
            Whether there is another node for new sandboxes.

        Raises:
            KeyError: The pool has no node with this name.
        """
        node = self._scheduler.nodes[name]
        node.is_draining = drains
        for stock in self._scheduler.stocks:
            for warm in [one for one in stock.instances if one.node is node and drains]:
                warm.end(Cause(CauseKind.STOPPED, f"node {name} is being drained"))
        self._scheduler.serve()
        return any(not one.is_draining for one in self._scheduler.nodes.values() if one is not node)

    def counts(self) -> PoolCounts:
        """Return the numbers of current sandboxes and requests, and totals since the pool was opened."""
        alive = [instance for instance in self._scheduler.instances.values() if not instance.is_over]
        return PoolCounts(
            states=Counter(instance.state for instance in alive),
            warm=sum(instance.state is SandboxState.READY for instance in alive),
            **asdict(self._history.tally),
            waiting=self._scheduler.queue.waiting(),
            alerts={kind: count for kind, count in self._history.events.counts.items() if kind != "state"},
            probe_s={instance.key: instance.latency_s for instance in alive if instance.latency_s is not None},
        )

    def wanted(self) -> int:
        """Return for how many sandboxes capacity is missing; a negative number says how many more sandboxes would fit.

        The free capacity is counted in sandboxes of one size: that of the first request or warm sandbox that waits for
        capacity; without one, that of the first warm stock; without stocks, that of a default spec. Requests that no
        additional node could serve do not count: those above a tenant's limit, or for a snapshot on a certain node.
        """
        missing, stocks = self._scheduler.missing(), self._scheduler.stocks
        demand = next(iter(missing), ResourceRequest.of(stocks[0].warm_spec.spec if stocks else SandboxSpec()))
        free = sum(node.room(demand) for node in usable(self._scheduler.nodes.values(), demand, now=clock.now()))
        return 0 if math.isinf(free) else len(missing) - int(free)

    async def persist(self) -> None:
        """Write all pending views to the ledger; give up after 10 s."""
        if self._history.ledger_writer is not None:
            with anyio.move_on_after(_LAST_WRITES_S, shield=True):
                await self._history.ledger_writer.write()

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            for stock in self._scheduler.stocks:
                why = why_impossible(self._scheduler.nodes.values(), ResourceRequest.of(stock.warm_spec.spec))
                if why is not None:
                    self._history.events.emit("stock", f"cannot keep a warm stock of {stock.warm_spec.name}: {why}")
            nodes = dict(self._scheduler.nodes)
            if self._ledger is not None and self._history.ledger_writer is not None:
                await self._reattach_all(self._ledger, nodes)
                self._tasks.start_soon(self._history.ledger_writer.run)
            self._tasks.start_soon(self._sweep)
            self._is_open = True
            for node in self._scheduler.nodes.values():
                if node is not nodes.get(node.name):  # the node joined during the re-attachment
                    self._clear(node)
            self._scheduler.open(self._tasks)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_open = False
        self._scheduler.close()
        for instance in list(self._scheduler.instances.values()):
            instance.end(CLOSED)
        try:
            with anyio.CancelScope(shield=True):
                for instance in list(self._scheduler.instances.values()):
                    await instance.cleared.wait()
            await clock.end_tasks(self._tasks, error)
        finally:
            self._history.events.close()
            await self.persist()

    async def _sweep(self) -> None:
        """Check at intervals, for each sandbox, whether it still answers and whether its lease has expired."""
        liveness_times, tick_s = self._liveness_times, self._liveness_times.tick_s
        due = clock.now() + tick_s
        while True:
            await anyio.sleep(max(0.0, due - clock.now()))
            now = clock.now()
            late_s, due = now - due, now + tick_s
            for instance in list(self._scheduler.instances.values()):
                if instance.is_over or not instance.settled.is_set():
                    continue
                if is_silent(instance, liveness_times, now=now, late_s=late_s) and not instance.is_diagnosing:
                    instance.is_diagnosing = True
                    self._tasks.start_soon(declare_lost, instance, liveness_times)
                if instance.is_in_use:
                    instance.used_at = now
                elif instance.ttl_s is not None and now - instance.used_at >= instance.ttl_s:
                    instance.end(Cause(CauseKind.EXPIRED, "time-to-live passed"))
            self._history.forget()

    def _clear(self, node: Node) -> None:
        """Remove sandboxes that the pool does not know, e.g. from an earlier connection, from a node that joins."""
        if self._ledger is not None:
            self._tasks.start_soon(reattach.end_others, self._ledger.id, {node.name: node}, self._known)

    async def _known(self) -> Collection[str]:
        """Wait until no sandbox is starting, and return the backend ids of all sandboxes on nodes of the pool."""
        for instance in list(self._scheduler.instances.values()):
            await instance.settled.wait()
        nodes, instances = self._scheduler.nodes, self._scheduler.instances.values()
        current = (instance for instance in instances if nodes.get(instance.node.name) is instance.node)
        return {instance.sandbox.id for instance in current if instance.sandbox is not None}

    async def _reattach_all(self, ledger: LedgerStore, nodes: Mapping[str, Node]) -> None:
        """Re-attach to the sandboxes of a previous process on `nodes`."""
        views = ledger.load()
        found = await reattach.attached(views, nodes)
        kept = {view.backend_id for view in views if view.key in found}

        async def known() -> Collection[str]:
            return kept

        await reattach.end_others(ledger.id, nodes, known)
        for view in views:
            if (own := _OWN_NAME.fullmatch(view.id)) is not None:
                self._scheduler.last_number = max(self._scheduler.last_number, int(own[1]))
            if is_over(view.state):
                continue
            # Skip a sandbox whose node was removed during the re-attachment.
            if view.key in found and self._scheduler.nodes.get(view.node) is nodes[view.node]:
                self._scheduler.reattach(self._tasks, view, found[view.key], is_named=own is None)
            elif view.state is SandboxState.STARTING:
                self._history.ended(ended(view, reattach.GONE))
            else:
                self._history.ended(ended(view, reattach.GONE, SandboxState.LOST))

    async def _persist(self, instance: Instance, ledger_writer: LedgerWriter) -> None:
        try:
            is_saved = await ledger_writer.saved(instance.key)
        except BaseException:
            instance.is_forgotten = True
            instance.end(GIVEN_UP)
            raise
        if not is_saved:
            instance.is_forgotten = True  # so that the caller can create it again with the same id
            instance.end(Cause(CauseKind.START_FAILED, "the ledger could not persist it"))
            raise LeaseNotPersistedError

    def _pending(self, key: TenantKey) -> anyio.Event | None:
        """Return an event that is set when the creation or removal of sandbox `key` ends; None if none is pending."""
        instance = self._scheduler.instances.get(key)
        if instance is not None and instance.is_forgotten:
            return instance.cleared
        return self._creating.get(key)

    def _find(self, key: TenantKey) -> SandboxView | None:
        instance = self._scheduler.instances.get(key)
        return self._history.past.get(key) if instance is None else instance.view()


def _parsed(snapshot: str | None) -> tuple[str, str] | None:
    """Return the node and the node's name of a snapshot."""
    node, _, name = (snapshot or "").partition("/")
    return (node, name) if snapshot else None


def _unknown(id: str) -> SandboxNotFoundError:
    return SandboxNotFoundError(f"there is no sandbox {id!r}")
