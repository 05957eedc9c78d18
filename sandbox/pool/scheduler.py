"""The sandboxes of a pool: who is placed where, lent to whom, and kept ready, from each one's start to its end."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from itertools import takewhile

import anyio
from anyio.abc import TaskGroup

from envkit import clock
from envkit.errors import CapacityError, ImpossibleSandboxError, SandboxError, SandboxRefusedError
from envkit.protocols import Sandbox
from envkit.restarts import RestartBudget
from envkit.types import Cause, CauseKind, SandboxSpec, SandboxState, SandboxView

from . import starting
from .events import EventLog
from .health import CLOSED, LivenessTimes, monitor
from .instance import GIVEN_UP, Instance
from .node import Node, ResourceRequest, beyond_share, cheapest_room, place, usable, why_impossible
from .queue import LeaseAnswer, LeaseQueue, LeaseRequest, payer
from .warm_stock import WarmSpec, WarmStock

_ROOM_S = 20.0
"""Seconds that who does not wait for room waits for what is being given up for it."""


class Scheduler:
    """Made by a pool, which opens it.

    Args:
        stocks: What is kept ready.
        journal: Told of everything.
        most: Sandboxes that one tenant may have at once; None for any number.
        share: Share of what all nodes hold together that one tenant may have beyond its first sandbox.
        watch: When one that is silent counts as what.
        budget: How often the spares of one stock may be replaced.
        ledger_id: Of the ledger in which sandboxes are written down, which outlive this process; None for none.

    Attributes:
        nodes: The nodes, by name.
        members: All that something is left of, by id.
        queue: Who waits.
        shelves: The spares.
        last_gone: Why the last node that is gone is gone; empty while none is.
        last_number: Number of the last sandbox to which the pool gave a name.
    """

    def __init__(
        self,
        stocks: list[WarmSpec],
        journal: EventLog,
        *,
        most: int | None,
        share: float,
        watch: LivenessTimes,
        budget: RestartBudget,
        ledger_id: str | None,
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.last_gone = ""
        self.members: dict[str, Instance] = {}
        self.queue: LeaseQueue[Instance] = LeaseQueue()
        self.shelves = [WarmStock(stock) for stock in stocks]
        self.last_number = 0
        self._journal = journal
        self._most = most
        self._share = share
        self._watch = watch
        self._budget = budget
        self._ledger_id = ledger_id
        self._held: dict[str | None, ResourceRequest] = {}
        self._tasks: TaskGroup
        self._is_open = False

    def open(self, tasks: TaskGroup) -> None:
        """Serve from now on, with everything in `tasks`."""
        self._tasks = tasks
        self._is_open = True
        self.serve()

    def close(self) -> None:
        """Start nothing any more, and let nobody wait."""
        self._is_open = False
        for ticket in self.queue.all():
            ticket.woken.set()

    async def take(self, ticket: LeaseRequest[Instance], wait_s: float | None) -> Instance:
        """Return a sandbox that is up; with a `wait_s` of None, waiting only for room that is being made.

        Raises: As `envkit.protocols.SandboxPool.lease`.
        """
        if not self._is_open:
            raise SandboxError("the pool is not open; use 'async with'")
        if (never := self._why_never(ticket)) is not None:
            raise never
        self.queue.add(ticket)
        try:
            self.serve()
            if ticket.given is None:
                makes_room = not self._is_at_bound(ticket) and self._makes_room(ticket)
                waited_s = wait_s if wait_s is not None else _ROOM_S if makes_room else 0.0
                with anyio.move_on_after(waited_s):
                    await ticket.woken.wait()
                if ticket.given is None:
                    raise ticket.refusal or CapacityError(self._why_full(ticket, waited_s))
            if not ticket.given.settled.is_set():  # a wait that is none would let the next spare be started first
                await ticket.given.settled.wait()
        except BaseException:
            self.queue.discard(ticket)
            if ticket.given is not None:
                ticket.given.is_forgotten = True
                ticket.given.end(GIVEN_UP)
            self.serve()
            raise
        if ticket.given.failure is not None:
            raise ticket.given.failure
        return ticket.given

    def serve(self) -> None:
        """Give what is free to who waits, and then to the stocks."""
        if not self._is_open:
            return
        self.queue.serve(self._offer)
        for shelf in self.shelves:
            spec, demand = shelf.stock.spec, ResourceRequest.of(shelf.stock.spec)
            while shelf.missing and clock.now() >= shelf.resumes_at:
                fitting = [node for node in self._awake(demand) if node.fits(demand)]
                node = place([node for node in fitting if not self._is_for_others(node, self.queue.short)], demand)
                if node is None:
                    break
                spare = Instance(self._own_name(), spec, node, self._entered)
                shelf.spares[spare] = None
                self._begin(spare, shelf.stock.boot)

    def refuse(self) -> None:
        """Tell those who can never be served by the nodes that there are now."""
        for ticket in self.queue.all():
            ticket.refusal = self._why_never(ticket)
            if ticket.refusal is not None:
                self.queue.discard(ticket)
                ticket.woken.set()

    def missing(self) -> list[ResourceRequest]:
        """Return what there is no room for and further nodes could give, first what is waited for.

        Of each tenant it is no more than it may have; what no node can hold is left out, as it could not be kept on
        more of them either.
        """
        held = dict(self._held)
        found = []
        for ticket in self.queue.all():
            if ticket.snapshot is None and self._why_bound(ticket, held.get(ticket.payer)) is None:
                held[ticket.payer] = held.get(ticket.payer, ResourceRequest()).with_other(ticket.demand)
                found.append(ticket.demand)
        for shelf in self.shelves:
            demand = ResourceRequest.of(shelf.stock.spec)
            if why_impossible(self.nodes.values(), demand) is None:
                found += [demand] * shelf.missing
        return found

    def come_back(
        self,
        tasks: TaskGroup,
        view: SandboxView,
        sandbox: Sandbox,
        *,
        is_lent: bool,
        is_named: bool,
        ttl_s: float | None,
    ) -> None:
        """Have again, before it is opened, what another process left running. What nobody holds is stopped.

        Args:
            tasks: Where it lives.
            view: What it was.
            sandbox: What was found of it.
            is_lent: Whether somebody has it.
            is_named: Whether who has it finds it by its id.
            ttl_s: Its time to live, in seconds.
        """
        member = Instance(view.id, view.spec, self.nodes[view.node], self._entered)
        member.tenant, member.ttl_s, member.is_lent, member.is_named = view.tenant, ttl_s, is_lent, is_named
        member.payer = payer(view.tenant, view.id if is_named else None)
        member.node.take(member.demand)
        self.members[member.id] = member
        shelf = None if is_lent else self._shelf(view.spec)
        if is_lent:
            self._count(member)
        elif shelf is not None and shelf.missing:
            shelf.spares[member] = None
        member.come_back(view.phases, SandboxState.LEASED if is_lent else SandboxState.READY, sandbox)
        if is_lent and not is_named:
            member.end(Cause(CauseKind.ORPHANED, "who held it is gone"))
        elif not is_lent and (shelf is None or member not in shelf.spares):
            member.end(Cause(CauseKind.STOPPED, "no stock wants it"))
        tasks.start_soon(self._live, member, None)

    def _offer(self, ticket: LeaseRequest[Instance]) -> LeaseAnswer:
        """Give `ticket` a spare, or room for a sandbox of its own."""
        if self._is_at_bound(ticket):
            return LeaseAnswer.AT_BOUND
        shelf = self._shelf(ticket.spec) if ticket.snapshot is None else None
        nodes = self._free_for(ticket)
        if shelf is not None and (spare := shelf.ready(nodes)) is not None:
            del shelf.spares[spare]
            ticket.given = spare
            self._lend(spare, ticket)
            return LeaseAnswer.GRANTED
        node = place(nodes, ticket.demand)
        if node is None:
            self._makes_room(ticket)
            return LeaseAnswer.NO_ROOM
        ticket.given = Instance(ticket.name or self._own_name(), ticket.spec, node, self._entered)
        ticket.given.snapshot = None if ticket.snapshot is None else ticket.snapshot[1]
        self._hold(ticket.given, ticket)
        self._begin(ticket.given, None)
        return LeaseAnswer.GRANTED

    def _homes(self, ticket: LeaseRequest[Instance]) -> Collection[Node]:
        """Return the nodes that could take what is wanted, if they had room."""
        if ticket.snapshot is None:
            return self.nodes.values()
        return [node for node in self.nodes.values() if node.name == ticket.snapshot[0]]

    def _free_for(self, ticket: LeaseRequest[Instance]) -> Collection[Node]:
        """Return those of its homes that are not kept for who has waited for too long."""
        homes = self._awake(ticket.demand) if ticket.snapshot is None else self._homes(ticket)
        claims = list(takewhile(lambda claim: claim is not ticket, self.queue.claims))
        return [node for node in homes if not self._is_for_others(node, claims)] if claims else homes

    def _awake(self, demand: ResourceRequest) -> Collection[Node]:
        return usable(self.nodes.values(), demand, now=clock.now())

    def _is_for_others(self, node: Node, others: Iterable[LeaseRequest[Instance]]) -> bool:
        """Say whether one of those `others`, who wait, could use this node."""
        return any(
            node.could_hold(one.demand) for one in others if one.snapshot is None or one.snapshot[0] == node.name
        )

    def _why_never(self, ticket: LeaseRequest[Instance]) -> SandboxError | None:
        """Return what is raised to who can never be served by the nodes that there are."""
        if ticket.snapshot is not None and ticket.snapshot[0] not in self.nodes:
            return SandboxRefusedError(ticket.name or "", f"there is no snapshot {'/'.join(ticket.snapshot)!r}")
        why = why_impossible(self._homes(ticket), ticket.demand)
        return None if why is None else ImpossibleSandboxError(why)

    def _lend(self, spare: Instance, ticket: LeaseRequest[Instance]) -> None:
        before = spare.record()
        self._hold(spare, ticket)
        if ticket.name is None:
            return spare.enter(SandboxState.LEASED, "lent")
        del self.members[spare.id]
        spare.id = ticket.name
        self.members[spare.id] = spare
        spare.enter(SandboxState.LEASED, f"lent; it was the spare {before.id}")
        # Second, so that a ledger knows it by one of its names at any moment.
        return self._journal.renamed(before, spare.id)

    def _hold(self, member: Instance, ticket: LeaseRequest[Instance]) -> None:
        member.tenant, member.ttl_s = ticket.tenant, ticket.ttl_s
        member.is_lent, member.is_named, member.payer = True, ticket.name is not None, ticket.payer
        member.used_at = clock.now()
        self._count(member)

    def _count(self, member: Instance) -> None:
        """Count a sandbox as its tenant's."""
        self._held[member.payer] = self._held.get(member.payer, ResourceRequest()).with_other(member.demand)

    def _begin(self, member: Instance, boot: Callable[[Sandbox], Awaitable[None]] | None) -> None:
        member.node.begin(member.demand, now=clock.now())
        self.members[member.id] = member
        member.enter(SandboxState.STARTING, f"starts on {member.node.name}")
        self._tasks.start_soon(self._live, member, boot)

    async def _live(self, member: Instance, boot: Callable[[Sandbox], Awaitable[None]] | None) -> None:
        """See a sandbox through its life; what is started here is stopped here."""
        try:
            try:
                with member.starting:
                    if member.sandbox is None:
                        is_trial = clock.now() < member.node.resumes_at
                        await starting.start(member, boot, ledger=self._ledger_id, nodes=self.nodes, move=self._move)
                        if is_trial:
                            self.serve()
            finally:
                if member.sandbox is not None:
                    await monitor(member, self._watch, self._journal.alert)
        except anyio.get_cancelled_exc_class():
            self.close()  # else what is ended here would be begun anew
            raise
        finally:
            member.end(CLOSED)
            self._leave(member)

    def _move(self, member: Instance, others: Collection[Node]) -> bool:
        """A sandbox did not start: put it on one of `others`, with room that nobody waits for; say if there is one."""
        self._tasks.start_soon(self._serve_at, member.node.resumes_at)
        free = (one for one in self._awake(member.demand) if not self._is_for_others(one, self.queue.claims))
        found = place((one for one in free if one in others), member.demand)
        if found is None:
            return False
        member.node.give_back(member.demand)
        member.node = found
        found.begin(member.demand, now=clock.now())
        self.serve()
        return True

    def _entered(self, member: Instance) -> None:
        """A sandbox has another state."""
        self._journal.entered(member)
        if member.state is SandboxState.READY:
            self.serve()
        elif member.is_over and not member.is_lent:
            self._off_shelf(member)

    def _off_shelf(self, spare: Instance) -> None:
        """A spare is over: another one is started, unless too many of them were over by themselves."""
        shelf = next((shelf for shelf in self.shelves if spare in shelf.spares), None)
        if shelf is None:
            return
        del shelf.spares[spare]
        is_to_blame = spare.state is SandboxState.LOST or spare.has_failed
        if not is_to_blame or self.nodes.get(spare.node.name) is not spare.node or not self._is_open:
            return
        now = clock.now()
        if shelf.fail(self._budget, now=now):
            self._journal.tally.restarts += 1
        else:
            spent = f"{self._budget.restarts} replacements within {self._budget.window_s:g} s are used up"
            until = "any more" if shelf.resumes_at == math.inf else f"for {shelf.resumes_at - now:.0f} s"
            text = f"stock of {shelf.stock.name}: {spent}; there is no other {until}; last: {spare.cause}"
            self._journal.alert("restarts", None, text, about=shelf)
        if shelf.resumes_at < math.inf:
            self._tasks.start_soon(self._serve_at, shelf.resumes_at)

    async def _serve_at(self, moment: float) -> None:
        await anyio.sleep(max(moment - clock.now(), 0.0))
        self.serve()

    def _leave(self, member: Instance) -> None:
        """Nothing is left of a sandbox."""
        member.node.give_back(member.demand)
        del self.members[member.id]
        if clock.now() < member.node.resumes_at:
            self._tasks.start_soon(self._serve_at, member.node.resumes_at)
        if member.is_lent:
            self._held[member.payer] = self._held[member.payer].without(member.demand)
            if not self._held[member.payer].boxes:
                del self._held[member.payer]
        self._journal.left(member)
        member.cleared.set()
        self.serve()

    def _is_at_bound(self, ticket: LeaseRequest[Instance]) -> bool:
        return self._why_bound(ticket, self._held.get(ticket.payer)) is not None

    def _why_bound(self, ticket: LeaseRequest[Instance], held: ResourceRequest | None) -> str | None:
        """Say why its tenant, which holds so much, may not have one more; None where it may."""
        if held is None or ticket.payer is None:
            return None
        if self._most is not None and held.boxes >= self._most:
            return f"the {self._most} sandboxes that it may have at once"
        if self._share == 1 or not ticket.tenant:
            return None
        why = beyond_share(self.nodes.values(), held.with_other(ticket.demand), self._share)
        return None if why is None else f"as much as one tenant may have at once: with this one, {why}"

    def _makes_room(self, ticket: LeaseRequest[Instance]) -> bool:
        """Say whether there will be room for `ticket` without anybody giving anything back, and see to it."""
        shelf = self._shelf(ticket.spec) if ticket.snapshot is None else None
        if shelf is not None and shelf.is_one_coming():
            return True
        if all(spare.cleared.is_set() for spare in ticket.giving_up):
            spares = [spare for shelf in self.shelves for spare in shelf.spares]
            spares.sort(key=lambda spare: spare.state is not SandboxState.STARTING)
            places = [(spare.node, spare.demand) for spare in spares]
            ticket.giving_up = [spares[at] for at in cheapest_room(self._free_for(ticket), places, ticket.demand) or ()]
            for spare in ticket.giving_up:
                spare.end(Cause(CauseKind.STOPPED, "its room is needed"))
        return bool(ticket.giving_up)

    def _why_full(self, ticket: LeaseRequest[Instance], waited_s: float) -> str:
        waited = f" within {waited_s:g} s" if waited_s else " now"
        if not self._is_open:
            return str(CLOSED)
        if (why := self._why_bound(ticket, self._held.get(ticket.payer))) is not None:
            return f"{ticket.who} has {why}; stop one of its sandboxes first"
        if not self.nodes:
            return "there are no nodes now" + (f"; {self.last_gone}" if self.last_gone else "")
        return f"no node has room for a further sandbox{waited}"

    def _shelf(self, spec: SandboxSpec) -> WarmStock | None:
        return next((shelf for shelf in self.shelves if shelf.stock.spec == spec), None)

    def _own_name(self) -> str:
        self.last_number += 1
        return f"pool-{self.last_number}"
