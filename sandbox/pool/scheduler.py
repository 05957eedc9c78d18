"""Scheduler of a pool: places sandboxes on nodes, serves lease requests, and refills the warm stocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import anyio
from anyio.abc import TaskGroup

from envkit import clock
from envkit.errors import CapacityError, ImpossibleSandboxError, SandboxError, SandboxRefusedError
from envkit.protocols import Sandbox
from envkit.restarts import Failures, Replacement, RestartBudget
from envkit.types import Cause, CauseKind, SandboxSpec, SandboxState, SandboxView, TenantKey

from . import starting
from .event_log import EventLog
from .health import CLOSED, LivenessTimes, monitor
from .instance import GIVEN_UP, Instance, was_leased
from .node import Node, ResourceRequest, beyond_share, cheapest_room, place, usable, why_impossible
from .queue import LeaseAnswer, LeaseQueue, LeaseRequest
from .warm_stock import WarmStock

_ROOM_S = 20.0
"""Maximum number of seconds that a request with ``wait_s=None`` waits for evicted warm sandboxes to stop."""


@dataclass(eq=False, kw_only=True)
class Scheduler:
    """Schedules the sandboxes of one pool. The pool creates, opens and closes the scheduler.

    The attributes that are not described here are arguments of `envkit.sandbox.pool.Pool`.

    Attributes:
        stocks: Warm stocks.
        history: Event log of the pool.
        budget: Limit on the restarts of each warm stock, and of each subject of `failed`.
        ledger_id: Id of the ledger that records the sandboxes, so that they can outlive this process; else None.
        nodes: Nodes by name.
        instances: All sandboxes that are not yet fully removed.
        queue: Waiting requests.
        last_gone: Why the last removed node left; empty if no node was removed.
        last_number: Number N in the last generated sandbox id, ``pool-N``.
    """

    stocks: Sequence[WarmStock]
    history: EventLog
    max_per_tenant: int | None
    share: float
    liveness_times: LivenessTimes
    budget: RestartBudget
    ledger_id: str | None
    nodes: dict[str, Node] = field(default_factory=dict)
    instances: dict[TenantKey, Instance] = field(default_factory=dict)
    queue: LeaseQueue = field(default_factory=LeaseQueue)
    last_gone: str = ""
    last_number: int = 0
    _failures: defaultdict[Hashable, Failures] = field(default_factory=lambda: defaultdict(Failures))
    _held: dict[str, ResourceRequest] = field(default_factory=dict)
    """Resources that leased sandboxes use, by tenant. Sandboxes of the pool's own process do not count."""
    _tasks: TaskGroup = field(init=False)
    _is_open: bool = False

    def open(self, tasks: TaskGroup) -> None:
        """Begin to serve requests; all tasks run in the task group `tasks`."""
        self._tasks = tasks
        self._is_open = True
        self.serve()

    def close(self) -> None:
        """Stop serving requests, and fail all waiting requests."""
        self._is_open = False
        for request in self.queue.all():
            request.woken.set()

    async def take(self, request: LeaseRequest, wait_s: float | None) -> Instance:
        """Return a running sandbox for a request; raises the errors of `envkit.protocols.SandboxPool.lease`.

        It waits up to `wait_s` seconds for room. With None, it waits up to 20 s, and only if a warm sandbox with this
        spec is starting or warm sandboxes are being evicted.
        """
        if not self._is_open:
            raise SandboxError("the pool is not open; use 'async with'")
        if (never := self._why_never(request)) is not None:
            raise never
        self.queue.add(request)
        try:
            self.serve()
            if request.given is None:
                makes_room = not self._is_at_bound(request) and self._makes_room(request)
                waited_s = wait_s if wait_s is not None else _ROOM_S if makes_room else 0.0
                with anyio.move_on_after(waited_s):
                    await request.woken.wait()
                if request.given is None:
                    raise request.refusal or CapacityError(self._why_full(request, waited_s))
            # Do not call `wait` on an event that is already set: it would yield to the event loop first.
            if not request.given.settled.is_set():
                await request.given.settled.wait()
        except BaseException:
            self.queue.discard(request)
            if request.given is not None:
                request.given.is_forgotten = True
                request.given.end(GIVEN_UP)
            self.serve()
            raise
        if request.given.failure is not None:
            raise request.given.failure
        return request.given

    def serve(self) -> None:
        """Serve the waiting requests, then refill the warm stocks."""
        if not self._is_open:
            return
        self.queue.serve(self._offer)
        for stock in self.stocks:
            spec, demand = stock.warm_spec.spec, ResourceRequest.of(stock.warm_spec.spec)
            while stock.missing and clock.now() >= stock.resumes_at:
                fitting = [node for node in self._usable(demand) if node.fits(demand)]
                node = place(
                    [node for node in fitting if not self._is_claimed(node, self.queue.unplaced)], demand, spec
                )
                if node is None:
                    break
                warm = Instance(TenantKey("", self._own_name()), spec, node, self._entered)
                stock.instances[warm] = None
                self._begin(warm, stock.warm_spec.boot)

    def refuse(self) -> None:
        """Fail the waiting requests that no current node could serve, even if the node were empty."""
        for request in self.queue.all():
            request.refusal = self._why_never(request)
            if request.refusal is not None:
                self.queue.discard(request)
                request.woken.set()

    def missing(self) -> list[ResourceRequest]:
        """Return the demands that additional nodes could serve: of waiting requests, then of missing warm sandboxes."""
        held = dict(self._held)
        found = []
        for request in self.queue.all():
            if request.snapshot is None and self._why_bound(request, held.get(request.tenant)) is None:
                if not request.is_own:
                    held[request.tenant] = held.get(request.tenant, ResourceRequest()).with_other(request.demand)
                found.append(request.demand)
        for stock in self.stocks:
            demand = ResourceRequest.of(stock.warm_spec.spec)
            if why_impossible(self.nodes.values(), demand) is None:
                found += [demand] * stock.missing
        return found

    def reattach(self, tasks: TaskGroup, view: SandboxView, sandbox: Sandbox, *, is_named: bool) -> None:
        """Take over a sandbox of a previous process. Must be called before `open`.

        The sandbox is stopped if it is warm and no stock needs it, or if it is leased under a generated id (not
        `is_named`), because its caller ended with the previous process.
        """
        instance = Instance(view.key, view.spec, self.nodes[view.node], self._entered)
        instance.is_leased = is_leased = was_leased(view)
        if view.expires_at_s is not None:
            instance.ttl_s = max(view.expires_at_s - view.phases[-1].at_s, 0.0)
        instance.is_own = view.key.is_own or not (is_named or view.tenant)
        instance.node.take(instance.demand)
        self.instances[instance.key] = instance
        stock = None if is_leased else self._stock_for(view.spec)
        if is_leased:
            self._count(instance)
        elif stock is not None and stock.missing:
            stock.instances[instance] = None
        instance.reattach(view.phases, SandboxState.LEASED if is_leased else SandboxState.READY, sandbox)
        if is_leased and not is_named:
            instance.end(Cause(CauseKind.ORPHANED, "the process that leased it is gone"))
        elif not is_leased and (stock is None or instance not in stock.instances):
            instance.end(Cause(CauseKind.STOPPED, "no warm stock needs it"))
        tasks.start_soon(self._live, instance, None)

    def _offer(self, request: LeaseRequest) -> LeaseAnswer:
        """Serve `request` with a warm or a new sandbox if its tenant is within limits and a node has room."""
        if self._is_at_bound(request):
            return LeaseAnswer.AT_BOUND
        stock = self._stock_for(request.spec) if request.snapshot is None else None
        nodes = self._unclaimed_nodes(request)
        if stock is not None and (warm := stock.ready(nodes)) is not None:
            del stock.instances[warm]
            request.given = warm
            self._lease(warm, request)
            return LeaseAnswer.GRANTED
        node = place(nodes, request.demand, request.spec)
        if node is None:
            self._makes_room(request)
            return LeaseAnswer.NO_ROOM
        key = TenantKey(request.tenant, request.name or self._own_name())
        request.given = Instance(key, request.spec, node, self._entered)
        request.given.snapshot = None if request.snapshot is None else request.snapshot[1]
        self._assign(request.given, request)
        self._begin(request.given, None)
        return LeaseAnswer.GRANTED

    def _eligible_nodes(self, request: LeaseRequest) -> Collection[Node]:
        """Return the nodes that may serve the request, even if full: all nodes, or only the one with its snapshot."""
        if request.snapshot is None:
            return self.nodes.values()
        return [node for node in self.nodes.values() if node.name == request.snapshot[0]]

    def _unclaimed_nodes(self, request: LeaseRequest) -> Collection[Node]:
        """Return the nodes that may serve `request` and are not reserved for another request that waited too long."""
        nodes = self._usable(request.demand) if request.snapshot is None else self._eligible_nodes(request)
        claims = list(takewhile(lambda claim: claim is not request, self.queue.claims))
        return [node for node in nodes if not self._is_claimed(node, claims)] if claims else nodes

    def _usable(self, demand: ResourceRequest) -> Collection[Node]:
        return usable(self.nodes.values(), demand, now=clock.now())

    def _is_claimed(self, node: Node, others: Iterable[LeaseRequest]) -> bool:
        """Return whether `node`, if it were empty, could serve one of the waiting requests `others`."""
        eligible = (other for other in others if other.snapshot is None or other.snapshot[0] == node.name)
        return any(node.could_hold(other.demand) for other in eligible)

    def _why_never(self, request: LeaseRequest) -> SandboxError | None:
        """Return an error if no current node could serve `request`, even if the node were empty; otherwise None."""
        if request.snapshot is not None and request.snapshot[0] not in self.nodes:
            return SandboxRefusedError(request.name or "", f"there is no snapshot {'/'.join(request.snapshot)!r}")
        why = why_impossible(self._eligible_nodes(request), request.demand)
        return None if why is None else ImpossibleSandboxError(why)

    def _lease(self, warm: Instance, request: LeaseRequest) -> None:
        before = warm.record()
        del self.instances[warm.key]
        warm.key = TenantKey(request.tenant, request.name or warm.id)
        self.instances[warm.key] = warm
        self._assign(warm, request)
        if warm.key == before.key:
            return warm.enter(SandboxState.LEASED, "leased")
        warm.enter(SandboxState.LEASED, f"leased; was warm as {before.id}")
        # Record the end of the old id last, so that in the ledger one of the sandbox's ids is always live.
        return self.history.renamed(before, warm.id)

    def _assign(self, instance: Instance, request: LeaseRequest) -> None:
        instance.ttl_s, instance.is_own, instance.is_leased = request.ttl_s, request.is_own, True
        instance.used_at = clock.now()
        self._count(instance)

    def _count(self, instance: Instance) -> None:
        """Count a sandbox towards its tenant's limits."""
        if not instance.is_own:
            tenant = instance.key.tenant
            self._held[tenant] = self._held.get(tenant, ResourceRequest()).with_other(instance.demand)

    def _begin(self, instance: Instance, boot: Callable[[Sandbox], Awaitable[None]] | None) -> None:
        instance.node.begin(instance.demand, now=clock.now())
        self.instances[instance.key] = instance
        instance.enter(SandboxState.STARTING, f"starts on {instance.node.name}")
        self._tasks.start_soon(self._live, instance, boot)

    async def _live(self, instance: Instance, boot: Callable[[Sandbox], Awaitable[None]] | None) -> None:
        """Start, monitor and stop a sandbox."""
        try:
            try:
                with instance.starting:
                    if instance.sandbox is None:
                        is_trial = clock.now() < instance.node.resumes_at
                        await starting.start(instance, boot, ledger=self.ledger_id, nodes=self.nodes, move=self._move)
                        if is_trial:
                            self.serve()
            finally:
                if instance.sandbox is not None:
                    await monitor(instance, self.liveness_times, self.history.alert)
        except anyio.get_cancelled_exc_class():
            self.close()  # otherwise `serve` would start a replacement
            raise
        finally:
            instance.end(CLOSED)
            self._leave(instance)

    def _move(self, instance: Instance, others: Collection[Node]) -> bool:
        """Move a sandbox that did not start to one of the nodes `others`; return False if all are full or reserved."""
        self._tasks.start_soon(self._serve_at, instance.node.resumes_at)
        free = (node for node in self._usable(instance.demand) if not self._is_claimed(node, self.queue.claims))
        target = place((node for node in free if node in others), instance.demand, instance.spec)
        if target is None:
            return False
        instance.node.give_back(instance.demand)
        instance.node = target
        target.begin(instance.demand, now=clock.now())
        self.serve()
        return True

    def _entered(self, instance: Instance) -> None:
        """Handle the change of `instance` to a new state."""
        self.history.entered(instance)
        if instance.state is SandboxState.READY:
            self.serve()
        elif instance.is_over and not instance.is_leased:
            self._replace_warm(instance)

    def _replace_warm(self, warm: Instance) -> None:
        """Remove an ended warm sandbox from its stock; if it failed, replace it when the restart budget allows it."""
        stock = next((stock for stock in self.stocks if warm in stock.instances), None)
        if stock is None:
            return
        del stock.instances[warm]
        is_at_fault = warm.state is SandboxState.LOST or warm.has_failed
        if not is_at_fault or self.nodes.get(warm.node.name) is not warm.node or not self._is_open:
            return
        restart = self.failed(stock, f"warm stock of {stock.warm_spec.name}", warm.cause)
        stock.resumes_at = max(stock.resumes_at, restart.at)
        self.history.tally.restarts += not restart.spent
        if stock.resumes_at < math.inf:
            self._tasks.start_soon(self._serve_at, stock.resumes_at)

    def failed(self, subject: Hashable, name: str, cause: object, *, excuse: anyio.Event | None = None) -> Replacement:
        """Record a failure in the restart budget; see `envkit.protocols.ServerPool.failed`."""
        now = clock.now()
        restart = self._failures[subject].add(self.budget, now=now, excuse=excuse)
        if restart.spent:
            until = "none" if restart.at == math.inf else f"in {restart.at - now:.0f} s"
            text = f"{name}: {restart.spent}; next restart: {until}; last cause: {cause}"
            self.history.alert("restarts", None, text, about=subject)
        return restart

    async def _serve_at(self, moment: float) -> None:
        await anyio.sleep(max(moment - clock.now(), 0.0))
        self.serve()

    def _leave(self, instance: Instance) -> None:
        """Free what a removed sandbox used of its node's capacity and of its tenant's limits, then serve requests."""
        instance.node.give_back(instance.demand)
        del self.instances[instance.key]
        if clock.now() < instance.node.resumes_at:
            self._tasks.start_soon(self._serve_at, instance.node.resumes_at)
        if instance.is_leased and not instance.is_own:
            tenant = instance.key.tenant
            self._held[tenant] = self._held[tenant].without(instance.demand)
            if not self._held[tenant].sandboxes:
                del self._held[tenant]
        self.history.left(instance)
        instance.cleared.set()
        self.serve()

    def _is_at_bound(self, request: LeaseRequest) -> bool:
        return self._why_bound(request, self._held.get(request.tenant)) is not None

    def _why_bound(self, request: LeaseRequest, held: ResourceRequest | None) -> str | None:
        """Return which limit a tenant that uses `held` would exceed with `request`; None if it would exceed none."""
        if held is None or request.is_own:
            return None
        if self.max_per_tenant is not None and held.sandboxes >= self.max_per_tenant:
            return f"limit of {self.max_per_tenant} sandboxes"
        if self.share == 1 or not request.tenant:
            return None
        why = beyond_share(self.nodes.values(), held.with_other(request.demand), self.share)
        return None if why is None else f"share of the fleet: with this sandbox, {why}"

    def _makes_room(self, request: LeaseRequest) -> bool:
        """Evict warm sandboxes if that makes room. Return whether `request` can be served before another lease ends."""
        stock = self._stock_for(request.spec) if request.snapshot is None else None
        if stock is not None and any(warm.state is SandboxState.STARTING for warm in stock.instances):
            return True
        if all(warm.cleared.is_set() for warm in request.evicting):
            candidates = [warm for stock in self.stocks for warm in stock.instances]
            candidates.sort(key=lambda warm: warm.state is not SandboxState.STARTING)
            evictable = [(warm.node, warm.demand) for warm in candidates]
            request.evicting = [
                candidates[at] for at in cheapest_room(self._unclaimed_nodes(request), evictable, request.demand) or ()
            ]
            for warm in request.evicting:
                warm.end(Cause(CauseKind.STOPPED, "evicted to make room"))
        return bool(request.evicting)

    def _why_full(self, request: LeaseRequest, waited_s: float) -> str:
        waited = f" within {waited_s:g} s" if waited_s else ""
        if not self._is_open:
            return str(CLOSED)
        if (why := self._why_bound(request, self._held.get(request.tenant))) is not None:
            return f"{request.tenant_text} is at its {why}; stop one of its sandboxes first"
        if not self.nodes:
            return "the pool has no nodes" + (f"; the last one left: {self.last_gone}" if self.last_gone else "")
        return f"no node had room for another sandbox{waited}; retry later"

    def _stock_for(self, spec: SandboxSpec) -> WarmStock | None:
        return next((stock for stock in self.stocks if stock.warm_spec.spec == spec), None)

    def _own_name(self) -> str:
        self.last_number += 1
        return f"pool-{self.last_number}"
