"""Who waits for a sandbox, and whose turn it is: fair among tenants, and nobody is passed by for ever."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

import anyio

from envkit.errors import SandboxError
from envkit.types import SandboxSpec

from .node import ResourceRequest

T = TypeVar("T")

MOST_PASSED = 32
"""How often others may be served while there is room for them and not for who has the turn. Then whatever could be used
by it waits for it, so that somebody who needs much is not kept waiting by many who need little."""


class LeaseAnswer(Enum):
    """What becomes of an offer."""

    GRANTED = "granted"
    NO_ROOM = "no room"
    AT_BOUND = "at bound"
    """Its tenant has as many as it may have."""


@dataclass(slots=True, eq=False)
class LeaseRequest(Generic[T]):
    """Somebody who waits.

    Attributes:
        spec: What is wanted.
        demand: What that takes of a node.
        tenant: For whom.
        name: What it is to be called; None for no name.
        ttl_s: Its time to live, in seconds; None for never.
        snapshot: The files that it is to begin with: the node that has them, and what they are called there.
        woken: Set when it is served, or when there is nothing to wait for any more.
        given: What it was given; None until then.
        refusal: Why it can never be served; None while it may be.
        giving_up: What is given up to make room for it.
        passed: How often others were served while there was no room for it.
    """

    spec: SandboxSpec
    demand: ResourceRequest
    tenant: str
    name: str | None = None
    ttl_s: float | None = None
    snapshot: tuple[str, str] | None = None
    woken: anyio.Event = field(default_factory=anyio.Event)
    given: T | None = None
    refusal: SandboxError | None = None
    giving_up: list[T] = field(default_factory=list)
    passed: int = 0

    @property
    def payer(self) -> str | None:
        """The tenant as whose it counts; None for whoever has the pool."""
        return payer(self.tenant, self.name)

    @property
    def who(self) -> str:
        """Its tenant, in words."""
        return f"tenant {self.tenant!r}" if self.tenant else "who has no token, which is one tenant,"


def payer(tenant: str, name: str | None) -> str | None:
    """Return the tenant as whose a sandbox counts; None for what whoever has the pool takes for itself.

    That is what has no tenant and no name, or a name with a colon before it.
    """
    return None if not tenant and (name is None or name.startswith(":")) else tenant


class LeaseQueue(Generic[T]):
    """Those who wait: of each tenant in the order of arrival, the tenants in turn.

    Attributes:
        short: Whom the last `serve` refused for want of room, rather than because of their tenant's bound.
        claims: Those of them who were passed too often: nobody is to be given what one of them before it could use.
    """

    def __init__(self) -> None:
        self.short: dict[LeaseRequest[T], None] = {}
        self.claims: dict[LeaseRequest[T], None] = {}
        self._lines: OrderedDict[str, deque[LeaseRequest[T]]] = OrderedDict()
        self._overdue: dict[LeaseRequest[T], None] = {}

    def add(self, ticket: LeaseRequest[T]) -> None:
        self._lines.setdefault(ticket.tenant, deque()).append(ticket)

    def discard(self, ticket: LeaseRequest[T]) -> None:
        """Let it wait no longer; safe to repeat."""
        line = self._lines.get(ticket.tenant)
        if line is not None and ticket in line:
            line.remove(ticket)
            if not line:
                del self._lines[ticket.tenant]
        for some in (self._overdue, self.short, self.claims):
            some.pop(ticket, None)

    def waiting(self) -> Mapping[str, int]:
        """Return how many wait, by tenant."""
        return {tenant: len(line) for tenant, line in self._lines.items()}

    def all(self) -> list[LeaseRequest[T]]:
        return [ticket for line in self._lines.values() for ticket in line]

    def serve(self, offer: Callable[[LeaseRequest[T]], LeaseAnswer]) -> None:
        """Offer what there is to the first of each tenant in turn, until a whole round takes nothing.

        Args:
            offer: Gives a ticket what it wants, if that is possible now and claimed by nobody.
        """
        self.short, self.claims = {}, {}
        for ticket in list(self._overdue):
            answer = offer(ticket)
            if answer is LeaseAnswer.GRANTED:
                self._grant(ticket)
            elif answer is LeaseAnswer.NO_ROOM:
                self.short[ticket] = self.claims[ticket] = None
        turns_left = len(self._lines)
        while turns_left:
            tenant, line = next(iter(self._lines.items()))
            ticket = line[0]
            turns_left -= 1
            answer = LeaseAnswer.NO_ROOM if ticket in self.claims else offer(ticket)
            if answer is LeaseAnswer.GRANTED:
                self._grant(ticket)
                turns_left = len(self._lines)
                self._pass()
                continue
            self._lines.move_to_end(tenant)
            if answer is LeaseAnswer.NO_ROOM:
                self.short[ticket] = None

    def _grant(self, ticket: LeaseRequest[T]) -> None:
        """It has what it wanted; the other tenants are next."""
        self.discard(ticket)
        if ticket.tenant in self._lines:
            self._lines.move_to_end(ticket.tenant)
        ticket.woken.set()

    def _pass(self) -> None:
        """Somebody was served while there was no room for others."""
        for ticket in self.short:
            ticket.passed += 1
            if ticket.passed == MOST_PASSED:
                self._overdue[ticket] = self.claims[ticket] = None
