"""Queue of lease requests: serves tenants round-robin, and prevents starvation of large requests."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import anyio

from envkit.errors import SandboxError
from envkit.types import SandboxSpec, TenantKey

from .instance import Instance
from .node import ResourceRequest

MOST_PASSED = 32
"""Number of other requests that may be served while one request fits on no node. After that, all nodes that are large
enough for the waiting request are reserved for it, because smaller requests would fill them again and again."""


class LeaseAnswer(Enum):
    """Result of an attempt to serve a request."""

    GRANTED = "granted"
    NO_ROOM = "no room"
    AT_BOUND = "at bound"
    """The tenant has reached one of its limits."""


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """A request for the lease of a sandbox.

    Attributes:
        spec: Spec of the sandbox.
        demand: Resources that the sandbox needs.
        tenant: Tenant that makes the request.
        name: Id of the sandbox; None means a generated id.
        ttl_s: Seconds without use after which the lease expires; None means never.
        snapshot: Node and name of the snapshot to restore; None means no snapshot.
        woken: Set when the request is served or refused, or the pool is closed.
        given: The leased sandbox; None until the request is served.
        refusal: Error if no node can ever serve the request; else None.
        evicting: Warm sandboxes that are being stopped to make room for this request.
        passed: Number of other requests that were served while this one fitted on no node.
    """

    spec: SandboxSpec
    demand: ResourceRequest
    tenant: str
    name: str | None = None
    ttl_s: float | None = None
    snapshot: tuple[str, str] | None = None
    woken: anyio.Event = field(default_factory=anyio.Event)
    given: Instance | None = None
    refusal: SandboxError | None = None
    evicting: list[Instance] = field(default_factory=list)
    passed: int = 0

    @property
    def is_own(self) -> bool:
        """Whether the pool's own process makes the request. Tenants' limits do not apply to it."""
        return TenantKey(self.tenant, self.name or ":").is_own

    @property
    def tenant_text(self) -> str:
        """The tenant as text for errors."""
        return f"tenant {self.tenant!r}" if self.tenant else "the anonymous tenant"


class LeaseQueue:
    """The waiting requests. Tenants are served round-robin, and the requests of one tenant in their order of arrival.

    Attributes:
        unplaced: Requests for which the last `serve` found no room, excluding those of tenants at their limits.
        claims: Requests in `unplaced` that reached `MOST_PASSED`. Nodes large enough for one are reserved for it.
    """

    def __init__(self) -> None:
        self.unplaced: dict[LeaseRequest, None] = {}
        self.claims: dict[LeaseRequest, None] = {}
        self._queues: OrderedDict[str, deque[LeaseRequest]] = OrderedDict()
        self._overdue: dict[LeaseRequest, None] = {}

    def add(self, request: LeaseRequest) -> None:
        self._queues.setdefault(request.tenant, deque()).append(request)

    def discard(self, request: LeaseRequest) -> None:
        """Remove a request, if it is in the queue."""
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

    def all(self) -> list[LeaseRequest]:
        return [request for queue in self._queues.values() for request in queue]

    def serve(self, offer: Callable[[LeaseRequest], LeaseAnswer]) -> None:
        """Serve the first request of each tenant in turn, until one round over all tenants has served no request."""
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

    def _grant(self, request: LeaseRequest) -> None:
        """Remove a served request from the queue, wake its caller, and put its tenant behind the other tenants."""
        self.discard(request)
        if request.tenant in self._queues:
            self._queues.move_to_end(request.tenant)
        request.woken.set()

    def _pass(self) -> None:
        """Count, in each request that found no room, that another request was served."""
        for request in self.unplaced:
            request.passed += 1
            if request.passed == MOST_PASSED:
                self._overdue[request] = self.claims[request] = None
