"""Nodes of a pool: track the capacity and use of each node, and choose a node for a sandbox."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from envkit.protocols import SandboxBackend
from envkit.restarts import Failures, RestartBudget
from envkit.types import SandboxSpec
from envkit.types.sandboxes import SandboxLimits

_BACKOFF = RestartBudget(restarts=sys.maxsize, longest_delay_s=10.0)
"""Backoff of a node after failed starts. The number of starts is not limited."""
_ROUNDING = 1e-9
"""Tolerance for rounding errors in sums of fractional CPUs."""


@runtime_checkable
class KnowsFiles(Protocol):
    """A backend that knows which images and files its machine has."""

    def lacks(self, spec: SandboxSpec) -> int:
        """Return how many of the image and the mounted folders of `spec` the machine lacks."""
        ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """Maximum number of sandboxes of a node, and maximum sums of their limits. None means no limit."""

    sandboxes: int | None = None
    cpus: float | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    pids: int | None = None


class ResourceRequest(NamedTuple):
    """Resources that one or more sandboxes need; see `Capacity` for the fields."""

    sandboxes: int = 0
    cpus: float = 0.0
    memory_mib: int = 0
    disk_mib: int = 0
    pids: int = 0

    @classmethod
    def of(cls, spec: SandboxSpec) -> ResourceRequest:
        """Return what a sandbox with this spec needs: its limits or their defaults; without a CPU limit, 0 CPUs."""
        limits = SandboxLimits.of(spec)
        return cls(1, limits.cpus or 0.0, limits.memory_mib, limits.disk_mib, limits.pids)

    def with_other(self, other: ResourceRequest) -> ResourceRequest:
        return ResourceRequest._make(map(operator.add, self, other))

    def without(self, other: ResourceRequest) -> ResourceRequest:
        return ResourceRequest._make(map(operator.sub, self, other))


class Node:
    """A node of a pool.

    The caller opens and closes the backend. Without a capacity, the node has no limits.

    Attributes:
        used: Resources that the node's sandboxes use.
        is_draining: Whether the node gets no new sandboxes.
        resumes_at: Event-loop time before which the node is in backoff: it gets no starts, because earlier ones failed.
    """

    def __init__(self, name: str, backend: SandboxBackend, capacity: Capacity | None = None) -> None:
        self.name = name
        self.backend = backend
        self.capacity = capacity or Capacity()
        self.used = ResourceRequest()
        self.is_draining = False
        self.resumes_at = 0.0
        self._failures = Failures()
        self._backoff_until = 0.0
        bounds = (getattr(self.capacity, field) for field in ResourceRequest._fields)
        self._bounds = tuple((index, bound) for index, bound in enumerate(bounds) if bound is not None)

    def take(self, demand: ResourceRequest) -> None:
        self.used = self.used.with_other(demand)

    def give_back(self, demand: ResourceRequest) -> None:
        self.used = self.used.without(demand)

    def begin(self, demand: ResourceRequest, *, now: float) -> None:
        """Reserve resources for a start. If earlier starts failed, delay others until this one ends, for up to 10 s."""
        self.take(demand)
        if self._backoff_until:
            self.resumes_at = now + _BACKOFF.longest_delay_s

    def failed(self, *, now: float) -> None:
        """Record a failed start, and back off for a time that increases with each failure."""
        self.resumes_at = self._backoff_until = self._failures.add(_BACKOFF, now=now).at

    def not_at_fault(self) -> None:
        """Record that a start failed because of its spec. This does not extend the node's backoff."""
        self.resumes_at = self._backoff_until

    def started(self) -> None:
        """Record a successful start, which ends the backoff."""
        self._failures = Failures()
        self.resumes_at = self._backoff_until = 0.0

    def fits(self, demand: ResourceRequest, freed: ResourceRequest | None = None) -> bool:
        """Return whether the node has room for `demand` after `freed` is released."""
        used = self.used if freed is None else self.used.without(freed)
        return not self.is_draining and all(
            used[index] + demand[index] <= bound + _ROUNDING for index, bound in self._bounds
        )

    def could_hold(self, demand: ResourceRequest) -> bool:
        """Return whether the node would have room for `demand` if it were empty."""
        return all(demand[index] <= bound + _ROUNDING for index, bound in self._bounds)

    def share(self, demand: ResourceRequest) -> float:
        """Return the node's load if `demand` is added: the used fraction of its scarcest resource."""
        used = self.used
        return max(((used[index] + demand[index]) / bound for index, bound in self._bounds if bound), default=0.0)

    def lacks(self, spec: SandboxSpec) -> int:
        """Return how many things that a sandbox needs, such as its image, are known not to be on the node."""
        return self.backend.lacks(spec) if isinstance(self.backend, KnowsFiles) else 0

    def room(self, demand: ResourceRequest) -> float:
        """Return how many more sandboxes with this demand the node has room for; infinity means no limit."""
        if self.is_draining:
            return 0.0
        used = self.used
        counts = ((bound - used[index] + _ROUNDING) // demand[index] for index, bound in self._bounds if demand[index])
        return max(min(counts, default=math.inf), 0.0)


def usable(nodes: Collection[Node], demand: ResourceRequest, *, now: float) -> Collection[Node]:
    """Return the nodes that are not in backoff; all nodes if only nodes in backoff are large enough for `demand`.

    Without backoff, a node where every start fails would be the least loaded, and would get nearly all requests.
    """
    available = [node for node in nodes if now >= node.resumes_at]
    if len(available) == len(nodes) or any(node.could_hold(demand) for node in available):
        return available
    return nodes


def place(nodes: Iterable[Node], demand: ResourceRequest, spec: SandboxSpec) -> Node | None:
    """Return the node for a new sandbox, or None if no node has room for `demand`.

    Nodes that have the image and the data of `spec` come first, then the least loaded, then those with the fewest
    sandboxes. A node that lacks the data refuses the sandbox, and the pool then tries others.
    """
    fitting = (node for node in nodes if node.fits(demand))
    return min(fitting, key=lambda node: (node.lacks(spec), node.share(demand), node.used.sandboxes), default=None)


def why_impossible(nodes: Collection[Node], demand: ResourceRequest) -> str | None:
    """Return, as text, which resources of `demand` no node has, even if empty; None if a node is large enough.

    Also returns None if there are no nodes, because nodes may join later.
    """
    if not nodes or any(node.could_hold(demand) for node in nodes):
        return None
    excesses = []
    for field in ResourceRequest._fields:
        asked, bounds = getattr(demand, field), [getattr(node.capacity, field) for node in nodes]
        if None not in bounds and asked > max(bounds):
            excesses.append(f"{field}={asked:.12g} exceeds every node (largest: {max(bounds):.12g})")
    if excesses:
        return "; ".join(excesses)
    asked_together = ", ".join(f"{field}={getattr(demand, field):.12g}" for field in ResourceRequest._fields[1:])
    return f"no node has {asked_together} together"


def beyond_share(nodes: Collection[Node], demand: ResourceRequest, share: float) -> str | None:
    """Return, as text, which resource of `demand` exceeds a tenant's share of all nodes, and the limit; else None.

    `demand` is what the tenant uses and requests, and `share` a fraction, in (0, 1], of each resource's total capacity.
    A resource that a node does not limit is not checked.
    """
    for field in ResourceRequest._fields:
        bounds = [getattr(node.capacity, field) for node in nodes]
        if bounds and None not in bounds and getattr(demand, field) > share * sum(bounds) + _ROUNDING:
            asked, most = getattr(demand, field), f"{share * sum(bounds):.12g}"
            return f"{field}={asked:.12g} exceeds {share:.0%} of all nodes (limit {most})"
    return None


def cheapest_room(
    nodes: Iterable[Node], candidates: Sequence[tuple[Node, ResourceRequest]], demand: ResourceRequest
) -> list[int] | None:
    """Return the indexes of `candidates` to evict from one node to make room for `demand`: as few as possible.

    `candidates` lists the preferred ones first. Returns None if no evictions can make enough room.
    """
    found: list[int] | None = None
    for node in nodes:
        freed, evicted = ResourceRequest(), []
        for number, (host, takes) in enumerate(candidates):
            if host is node and not node.fits(demand, freed):
                freed = freed.with_other(takes)
                evicted.append(number)
        if node.fits(demand, freed) and (found is None or len(evicted) < len(found)):
            found = evicted
    return found
