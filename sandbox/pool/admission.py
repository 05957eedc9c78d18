"""Who waits for a sandbox, and whose turn it is: fair among tenants, and nobody is passed by for ever."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

import anyio

from envkit.sandbox.pool.nodes import Demand
from envkit.types import SandboxSpec

T = TypeVar("T")

MOST_PASSED = 32
"""How often others may be served while there is room for them and not for who has the turn. Then all wait for it, so
that somebody who needs much is not kept waiting by many who need little."""


class Answer(Enum):
    """What becomes of an offer."""

    GRANTED = "granted"
    NO_ROOM = "no room"
    AT_BOUND = "at bound"
    """Its tenant has as many as it may have."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
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
        giving_up: What is given up to make room for it.
        passed: How often others were served while there was no room for it.
    """

    spec: SandboxSpec
    demand: Demand
    tenant: str
    name: str | None = None
    ttl_s: float | None = None
    snapshot: tuple[str, str] | None = None
    woken: anyio.Event = field(default_factory=anyio.Event)
    given: T | None = None
    giving_up: list[T] = field(default_factory=list)
    passed: int = 0


class Queue(Generic[T]):
    """Those who wait: of each tenant in the order of arrival, the tenants in turn.

    Attributes:
        is_short: Whether somebody waits for room, rather than because of its tenant's bound, since the last `serve`.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Ticket[T]]] = OrderedDict()
        self.is_short = False

    def add(self, ticket: Ticket[T]) -> None:
        self._lines.setdefault(ticket.tenant, deque()).append(ticket)

    def discard(self, ticket: Ticket[T]) -> None:
        """Let it wait no longer; safe to repeat."""
        line = self._lines.get(ticket.tenant)
        if line is not None and ticket in line:
            line.remove(ticket)
            if not line:
                del self._lines[ticket.tenant]

    def waiting(self) -> Mapping[str, int]:
        """Return how many wait, by tenant."""
        return {tenant: len(line) for tenant, line in self._lines.items()}

    def all(self) -> list[Ticket[T]]:
        return [ticket for line in self._lines.values() for ticket in line]

    def serve(self, offer: Callable[[Ticket[T]], Answer]) -> None:
        """Offer what there is to the first of each tenant in turn, until a whole round takes nothing.

        Args:
            offer: Gives a ticket what it wants, if that is possible now.
        """
        refused: set[Ticket[T]] = set()
        turns_left = len(self._lines)
        self.is_short = False
        while turns_left:
            tenant, line = next(iter(self._lines.items()))
            ticket = line[0]
            answer = offer(ticket)
            if answer is Answer.NO_ROOM:
                self.is_short = True
                if ticket.passed >= MOST_PASSED:
                    return  # it stays the next
                refused.add(ticket)
            self._lines.move_to_end(tenant)
            turns_left -= 1
            if answer is Answer.GRANTED:
                line.popleft()
                if not line:
                    del self._lines[tenant]
                for one in refused:
                    one.passed += 1
                turns_left = len(self._lines)
                ticket.woken.set()
