"""Queue of lease requests: round-robin among tenants, and without starvation."""

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
"""How often a request may be passed over for lack of room. Then it gets a claim on every node that could hold it, so
that many small requests do not starve a large one."""


class LeaseAnswer(Enum):
    """Result of an attempt to serve a request."""

    GRANTED = "granted"
    NO_ROOM = "no room"
    AT_BOUND = "at bound"
    """The tenant is at its limit."""


@dataclass(slots=True, eq=False)
class LeaseRequest(Generic[T]):
    """A request for a sandbox.

    Attributes:
        spec: The requested spec.
        demand: Resources that it needs.
        tenant: The tenant that requests it.
        name: Id of the sandbox; None for a generated one.
        ttl_s: Time to live in seconds; None for unlimited.
        snapshot: Snapshot to restore, as node and name on that node.
        woken: Set when it is served, or will not be.
        given: The sandbox; None until it is served.
        refusal: Why it can never be served; None while it may be.
        evicting: Warm sandboxes that are stopped to make room for it.
        passed: How often it was passed over for lack of room.
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
    evicting: list[T] = field(default_factory=list)
    passed: int = 0

    @property
    def payer(self) -> str | None:
        """The tenant that it counts for; None for the pool's owner."""
        return payer(self.tenant, self.name)

    @property
    def tenant_text(self) -> str:
        """Its tenant, for error texts."""
        return f"tenant {self.tenant!r}" if self.tenant else "the anonymous tenant"


def payer(tenant: str, name: str | None) -> str | None:
    """Return the tenant that a sandbox counts for; None for the pool's owner.

    The owner's sandboxes have no tenant, and either no name or one that starts with a colon.
    """
    return None if not tenant and (name is None or name.startswith(":")) else tenant


class LeaseQueue(Generic[T]):
    """Waiting requests: first come, first served within a tenant, round-robin among tenants.

    Attributes:
        unplaced: Requests that the last `serve` could not place for lack of room, not because of the tenant's limit.
        claims: Those of them that were passed over too often; nodes that could hold one are reserved for it.
    """

    def __init__(self) -> None:
        self.unplaced: dict[LeaseRequest[T], None] = {}
        self.claims: dict[LeaseRequest[T], None] = {}
        self._queues: OrderedDict[str, deque[LeaseRequest[T]]] = OrderedDict()
        self._overdue: dict[LeaseRequest[T], None] = {}

    def add(self, request: LeaseRequest[T]) -> None:
        self._queues.setdefault(request.tenant, deque()).append(request)

    def discard(self, request: LeaseRequest[T]) -> None:
        """Remove a request; idempotent."""
        queue = self._queues.get(request.tenant)
        if queue is not None and request in queue:
            queue.remove(request)
            if not queue:
                del self._queues[request.tenant]
        for requests in (self._overdue, self.unplaced, self.claims):
            requests.pop(request, None)

    def waiting(self) -> Mapping[str, int]:
        """Return the number of waiting requests by tenant."""
        return {tenant: len(queue) for tenant, queue in self._queues.items()}

    def all(self) -> list[LeaseRequest[T]]:
        return [request for queue in self._queues.values() for request in queue]

    def serve(self, offer: Callable[[LeaseRequest[T]], LeaseAnswer]) -> None:
        """Serve the first request of each tenant in turn, until a whole round serves none.

        Args:
            offer: Serves a request if there is room that no other request claims.
        """
        self.unplaced, self.claims = {}, {}
        for request in list(self._overdue):
            answer = offer(request)
            if answer is LeaseAnswer.GRANTED:
                self._grant(request)
            elif answer is LeaseAnswer.NO_ROOM:
                self.unplaced[request] = self.claims[request] = None
        tenants_left = len(self._queues)
        while tenants_left:
            tenant, queue = next(iter(self._queues.items()))
            request = queue[0]
            tenants_left -= 1
            answer = LeaseAnswer.NO_ROOM if request in self.claims else offer(request)
            if answer is LeaseAnswer.GRANTED:
                self._grant(request)
                tenants_left = len(self._queues)
                self._pass()
                continue
            self._queues.move_to_end(tenant)
            if answer is LeaseAnswer.NO_ROOM:
                self.unplaced[request] = None

    def _grant(self, request: LeaseRequest[T]) -> None:
        """Complete a served request and move its tenant to the end."""
        self.discard(request)
        if request.tenant in self._queues:
            self._queues.move_to_end(request.tenant)
        request.woken.set()

    def _pass(self) -> None:
        """Count one more pass for each request that found no room."""
        for request in self.unplaced:
            request.passed += 1
            if request.passed == MOST_PASSED:
                self._overdue[request] = self.claims[request] = None
