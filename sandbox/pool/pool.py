"""A pool: lends sandboxes of any number of nodes, keeps some ready, and knows of each whether it is alive.

A sandbox belongs to one task from its start until nothing is left of it. Who holds one is told of its end at once, and
is not given another one in its place unasked: what was in it is gone, and only who used it knows what that means.
Spares alone are replaced.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
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
from envkit.protocols import Sandbox
from envkit.restarts import RestartBudget
from envkit.types import Cause, CauseKind, PoolEvent, SandboxSpec, SandboxState, SandboxView

from . import reattach
from .events import EventLog, LedgerStore, LedgerWriter
from .health import CLOSED, Liveness, LivenessTimes, check, declare_lost
from .instance import GIVEN_UP, STOPPED, Instance, ended, is_over, time_to_live
from .lease import Lease
from .metrics import PoolCounts, wanted
from .node import Node, ResourceRequest, usable, why_impossible
from .queue import LeaseRequest
from .scheduler import Scheduler
from .warm_stock import WarmSpec

__all__ = ["Pool"]

_OWN_NAME = re.compile(r"pool-(\d+)")
_LAST_WRITES_S = 10.0


class Pool:
    """Lends sandboxes; satisfies `envkit.protocols.SandboxPool`. Used as ``async with``.

    Entering takes back what a ledger knows, and begins to fill the stocks; leaving stops everything that was started,
    all at once and each within 15 s.

    Args:
        nodes: Where sandboxes are at first; their backends are open for as long as the pool is.
        stocks: What is kept ready.
        most: Sandboxes that one tenant may have at once; None for any number. Of tenant ``""``, those are not counted
            that have no name or one with a colon before it: whoever has the pool takes them for itself.
        share: Share of what all nodes hold together that one tenant may have beyond its first sandbox. It does not
            bound tenant ``""``.
        watch: When one that is silent counts as what.
        restarts: How often the spares of one stock may be replaced because they did not start or died; None for 20
            times in 10 minutes.
        ledger: Where sandboxes are written down, so that the next pool finds them; they outlive this process then.
    """

    def __init__(
        self,
        nodes: Sequence[Node] = (),
        *,
        stocks: Sequence[WarmSpec] = (),
        most: int | None = None,
        share: float = 1.0,
        watch: LivenessTimes | None = None,
        restarts: RestartBudget | None = None,
        ledger: LedgerStore | None = None,
    ) -> None:
        self._watch = watch or LivenessTimes()
        self._ledger = ledger
        self._journal = EventLog(ledger)
        self._roster = Scheduler(
            list(stocks),
            self._journal,
            most=most,
            share=share,
            watch=self._watch,
            budget=restarts or RestartBudget(restarts=20),
            ledger_id=None if ledger is None else ledger.id,
        )
        self._making: dict[str, anyio.Event] = {}
        self._is_open = False
        for node in nodes:
            self.add_node(node)

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec, *, tenant: str = "", wait_s: float = 60.0) -> AsyncIterator[Sandbox]:
        """Lend a sandbox for the length of the block; see `envkit.protocols.SandboxPool.lease`.

        Leaving the block waits until nothing is left of it.
        """
        member = await self._roster.take(LeaseRequest(spec, ResourceRequest.of(spec), tenant), wait_s)
        try:
            yield _handle(member)
        finally:
            member.end(Cause(CauseKind.STOPPED, "given back"))
            with anyio.CancelScope(shield=True):
                await member.cleared.wait()

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
        """Lend a sandbox under a name; see `envkit.protocols.SandboxPool.create`."""
        if not id or _OWN_NAME.fullmatch(id):
            raise SandboxConflictError(f"{id!r} is not a name that can be given")
        while (coming := self._coming(id)) is not None:
            await coming.wait()
        self._journal.past.take_name(id)
        known = self._seen(id)
        node, _, name = (snapshot or "").partition("/")
        files = (node, name) if snapshot else None
        if known is not None:
            if known.spec != spec or known.tenant != tenant:
                raise SandboxConflictError(f"{id!r} is taken by a sandbox with another spec or of somebody else")
            member = self._roster.members.get(id)
            if member is not None and member.files != files:
                raise SandboxConflictError(f"{id!r} is taken by a sandbox that began with other files")
            return known
        made = self._making[id] = anyio.Event()
        try:
            member = await self._roster.take(
                LeaseRequest(spec, ResourceRequest.of(spec), tenant, id, ttl_s, files), wait_s
            )
            if self._journal.saver is not None:
                await self._write_down(member, self._journal.saver)
            return member.view()
        finally:
            del self._making[id]
            made.set()

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return how much of a disk a snapshot takes; 0 if it is gone, perhaps with its node."""
        node, _, name = snapshot.partition("/")
        found = self._roster.nodes.get(node)
        return 0 if found is None else await found.backend.snapshot_bytes(name)

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot; safe to repeat."""
        node, _, name = snapshot.partition("/")
        if (found := self._roster.nodes.get(node)) is not None:
            await found.backend.remove_snapshot(name)

    def get(self, id: str, *, tenant: str | None = None) -> Sandbox:
        """Return a sandbox by its name; see `envkit.protocols.SandboxPool.get`.

        Raises:
            CapacityError: It is still being started.
        """
        member = self._roster.members.get(id)
        if member is None or member.is_over:
            cause = self.view(id, tenant=tenant).phases[-1].cause
            assert cause is not None, "a sandbox that is over has a cause"
            raise SandboxLostError(id, cause)
        if not member.is_lent or tenant not in (None, member.tenant):
            raise _unknown(id)
        if not member.settled.is_set():
            raise CapacityError(f"sandbox {id} is still being started")
        member.used_at = clock.now()
        return _handle(member)

    def view(self, id: str, *, tenant: str | None = None) -> SandboxView:
        """Look at a sandbox without using it; those that are over can be seen for 10 minutes, the last 1,000."""
        found = self._seen(id)
        if found is None or tenant not in (None, found.tenant):
            raise _unknown(id)
        return found

    def views(self, *, tenant: str | None = None) -> Sequence[SandboxView]:
        """Look at all sandboxes, oldest first."""
        found = [*self._journal.past.all(), *(member.view() for member in self._roster.members.values())]
        seen = (view for view in found if tenant in (None, view.tenant))
        return sorted(seen, key=lambda view: view.phases[0].at_s)

    async def stop(self, id: str, *, tenant: str | None = None) -> None:
        """End a sandbox and wait until nothing is left of it; see `envkit.protocols.SandboxPool.stop`."""
        member = self._roster.members.get(id)
        if member is not None and tenant in (None, member.tenant):
            member.end(STOPPED)
            await member.cleared.wait()
        self._journal.past.free(id, tenant)

    def events(self, *, after: int = 0) -> AsyncIterator[PoolEvent]:
        """Give what happened and what happens; see `envkit.protocols.SandboxPool.events`.

        The last 10,000 events are remembered. A reader who is slower than that misses some, as their numbers show.
        Besides ``"state"`` there are ``"memory"``, ``"disk"``, ``"probe"``, ``"restarts"`` and ``"stop"``, each at most
        once a minute for one sandbox, ``"stock"`` and ``"ledger"``. It ends when the pool does.
        """
        return self._journal.events.since(after)

    def alert(self, kind: str, text: str) -> None:
        """Tell of something that is to be looked at and is about no single sandbox; once a minute for each kind."""
        self._journal.alert(kind, None, text)

    def add_node(self, node: Node) -> None:
        """Use a further node from now on. What runs there for our ledger, and we do not know, is ended.

        Raises:
            ValueError: There is one of this name.
        """
        if node.name in self._roster.nodes:
            raise ValueError(f"there is a node {node.name!r} already")
        self._roster.nodes[node.name] = node
        if self._is_open:
            self._clear(node)
        self._roster.serve()

    def remove_node(self, name: str, cause: Cause) -> None:
        """Use a node no longer: all its sandboxes are lost, for `cause`. Safe to repeat."""
        node = self._roster.nodes.pop(name, None)
        if node is not None:
            self._roster.last_gone = str(cause)
        for member in list(self._roster.members.values()):
            if member.node is node:
                member.lose(cause)
        self._roster.refuse()
        self._roster.serve()

    def counts(self) -> PoolCounts:
        """Return how it does now, and what has happened since it was opened."""
        alive = [member for member in self._roster.members.values() if not member.is_over]
        tally = self._journal.tally
        return PoolCounts(
            states=Counter(member.state for member in alive),
            spares=sum(member.state is SandboxState.READY for member in alive),
            starts=tally.starts,
            failed_starts=tally.failed_starts,
            finished=tally.finished,
            losses=dict(tally.losses),
            restarts=tally.restarts,
            waiting=self._roster.queue.waiting(),
            alerts={kind: count for kind, count in self._journal.events.counts.items() if kind != "state"},
            probe_s={member.id: member.latency_s for member in alive if member.latency_s is not None},
        )

    def wanted(self) -> int:
        """Return how many more sandboxes there should be room for, or, negative, how many fewer would do.

        Room is counted in sandboxes such as who waits longest wants, else the first stock, else of no given bounds.
        What further nodes could not help is not wanted: what is beyond a tenant's bound, and stocks too large for any.
        """
        missing, shelves = self._roster.missing(), self._roster.shelves
        demand = next(iter(missing), ResourceRequest.of(shelves[0].stock.spec if shelves else SandboxSpec()))
        free = sum(node.room(demand) for node in usable(self._roster.nodes.values(), demand, now=clock.now()))
        return wanted(missing=len(missing), free=free)

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            for shelf in self._roster.shelves:
                why = why_impossible(self._roster.nodes.values(), ResourceRequest.of(shelf.stock.spec))
                if why is not None:
                    self._journal.events.emit("stock", f"stock of {shelf.stock.name} cannot be kept: {why}")
            nodes = dict(self._roster.nodes)
            if self._ledger is not None and self._journal.saver is not None:
                await self._take_back(self._ledger, nodes)
                self._tasks.start_soon(self._journal.saver.run)
            self._tasks.start_soon(self._sweep)
            self._is_open = True
            for node in self._roster.nodes.values():
                if node is not nodes.get(node.name):  # it came meanwhile
                    self._clear(node)
            self._roster.open(self._tasks)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._roster.close()
        for member in list(self._roster.members.values()):
            member.end(CLOSED)
        try:
            with anyio.CancelScope(shield=True):
                for member in list(self._roster.members.values()):
                    await member.cleared.wait()
            self._tasks.cancel_scope.cancel()
            # Only a cancellation is the task group's business: any other error is to leave the block as it is.
            if not isinstance(error, anyio.get_cancelled_exc_class()):
                kind = error = trace = None
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            self._journal.events.close()
            if self._journal.saver is not None:
                with anyio.move_on_after(_LAST_WRITES_S, shield=True):
                    await self._journal.saver.write()

    async def _sweep(self) -> None:
        """Look at all sandboxes now and then: who is silent, and whose time is over."""
        tick_s = self._watch.tick_s
        due = clock.now() + tick_s
        while True:
            await anyio.sleep(max(0.0, due - clock.now()))
            now = clock.now()
            late_s, due = now - due, now + tick_s
            watch = self._watch.among(len(self._roster.members))
            for member in list(self._roster.members.values()):
                if member.is_over or not member.settled.is_set():
                    continue
                if check(member, watch, now=now, late_s=late_s) is Liveness.LOST and not member.is_judged:
                    member.is_judged = True
                    self._tasks.start_soon(declare_lost, member, watch)
                if member.is_in_use:
                    member.used_at = now
                elif member.ttl_s is not None and now - member.used_at >= member.ttl_s:
                    member.end(Cause(CauseKind.EXPIRED, "time-to-live passed"))
            self._journal.forget()

    def _clear(self, node: Node) -> None:
        """Have ended what a node that joins still runs for our ledger: from before it was lost, or our server was."""
        if self._ledger is not None:
            self._tasks.start_soon(reattach.end_others, self._ledger.id, {node.name: node}, self._known)

    async def _known(self) -> Collection[str]:
        """Return the ids of all boxes on the nodes that there are, also of those that are being started now.

        On a node that is gone nobody ends its boxes: those that are still there are nobody's.
        """
        for member in list(self._roster.members.values()):
            await member.settled.wait()
        ours = (one for one in self._roster.members.values() if self._roster.nodes.get(one.node.name) is one.node)
        return {member.sandbox.id for member in ours if member.sandbox is not None}

    async def _take_back(self, ledger: LedgerStore, nodes: Mapping[str, Node]) -> None:
        """Come back to what another process left running on the `nodes`."""
        views = ledger.load()
        found = await reattach.attached(views, nodes)
        kept = {view.backend_id for view in views if view.id in found}

        async def known() -> Collection[str]:
            return kept

        await reattach.end_others(ledger.id, nodes, known)
        for view in views:
            if (own := _OWN_NAME.fullmatch(view.id)) is not None:
                self._roster.last_number = max(self._roster.last_number, int(own[1]))
            if is_over(view.state):
                continue
            if view.id in found and self._roster.nodes.get(view.node) is nodes[view.node]:  # not lost meanwhile
                self._roster.come_back(
                    self._tasks,
                    view,
                    found[view.id],
                    is_lent=reattach.was_lent(view),
                    is_named=own is None,
                    ttl_s=time_to_live(view),
                )
            elif view.state is SandboxState.STARTING:
                self._journal.ended(ended(view, reattach.GONE))
            else:
                self._journal.ended(ended(view, reattach.GONE, SandboxState.LOST))

    async def _write_down(self, member: Instance, saver: LedgerWriter) -> None:
        try:
            is_saved = await saver.saved(member.id)
        except BaseException:
            member.is_forgotten = True
            member.end(GIVEN_UP)
            raise
        if not is_saved:
            member.is_forgotten = True  # so that the same call makes it as soon as it can be
            member.end(Cause(CauseKind.START_FAILED, "it could not be written down"))
            raise LeaseNotPersistedError

    def _coming(self, id: str) -> anyio.Event | None:
        """Return what is set once it is known what becomes of a name; None if that is known."""
        member = self._roster.members.get(id)
        if member is not None and member.is_forgotten:
            return member.cleared
        return self._making.get(id)

    def _seen(self, id: str) -> SandboxView | None:
        member = self._roster.members.get(id)
        return self._journal.past.get(id) if member is None else member.view()


def _handle(member: Instance) -> Lease:
    assert member.sandbox is not None
    return Lease(member, member.sandbox)


def _unknown(id: str) -> SandboxNotFoundError:
    return SandboxNotFoundError(f"there is no sandbox {id!r}")
