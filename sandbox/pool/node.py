"""Nodes: where the sandboxes of a pool are, what each can hold, and which of them gets the next one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from envkit.protocols import SandboxBackend
from envkit.restarts import RestartBudget, restart_delay
from envkit.types import SandboxSpec

_MEMORY_MIB = 1024
_DISK_MIB = 256
_SYSTEM_DISK_MIB = 4096
_PIDS = 256
_RESTS = RestartBudget(restarts=10, longest_delay_s=10.0)
"""How long a node rests after a failed start; its last nine failures are kept, so that it is never for good."""
_ROUNDING = 1e-9
"""Shares of processors that are added and taken away again do not come out even."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a node can hold together; None is not counted.

    Attributes:
        boxes: Sandboxes.
        cpus: Processors that their bounds add up to.
        memory_mib: MiB of memory, likewise.
        disk_mib: MiB of disk, likewise.
        pids: Processes and threads, likewise.
    """

    boxes: int | None = None
    cpus: float | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    pids: int | None = None


class ResourceRequest(NamedTuple):
    """What a sandbox takes of its node, or several take together; the names are those of `Capacity`."""

    boxes: int = 0
    cpus: float = 0.0
    memory_mib: int = 0
    disk_mib: int = 0
    pids: int = 0

    @classmethod
    def of(cls, spec: SandboxSpec) -> ResourceRequest:
        """Fill in what `spec` leaves open as backends do; processors that have no bound are not counted."""
        memory_mib = _MEMORY_MIB if spec.memory_mib is None else spec.memory_mib
        default_mib = _SYSTEM_DISK_MIB if spec.profile == "system" else min(_DISK_MIB, max(memory_mib // 4, 1))
        disk_mib = default_mib if spec.disk_mib is None else spec.disk_mib
        pids = _PIDS if spec.pids is None else spec.pids
        return cls(1, spec.cpus or 0.0, memory_mib, disk_mib, pids)

    def with_other(self, other: ResourceRequest) -> ResourceRequest:
        return ResourceRequest(
            self.boxes + other.boxes,
            self.cpus + other.cpus,
            self.memory_mib + other.memory_mib,
            self.disk_mib + other.disk_mib,
            self.pids + other.pids,
        )

    def without(self, other: ResourceRequest) -> ResourceRequest:
        return ResourceRequest(
            self.boxes - other.boxes,
            self.cpus - other.cpus,
            self.memory_mib - other.memory_mib,
            self.disk_mib - other.disk_mib,
            self.pids - other.pids,
        )


class Node:
    """One place for sandboxes.

    Args:
        name: Its name in the pool.
        backend: Starts its sandboxes; somebody else opens and closes it.
        holds: What it can hold together.

    Attributes:
        used: What its sandboxes take together.
        resumes_at: Until when, on the clock of the loop, it is given a rest because sandboxes did not start there.
    """

    def __init__(self, name: str, backend: SandboxBackend, holds: Capacity | None = None) -> None:
        self.name = name
        self.backend = backend
        self.holds = holds or Capacity()
        self.used = ResourceRequest()
        self.resumes_at = 0.0
        self._failures: list[float] = []
        self._rests_until = 0.0
        bounds = (getattr(self.holds, field) for field in ResourceRequest._fields)
        self._bounds = tuple((place, bound) for place, bound in enumerate(bounds) if bound is not None)

    def take(self, demand: ResourceRequest) -> None:
        self.used = self.used.with_other(demand)

    def give_back(self, demand: ResourceRequest) -> None:
        self.used = self.used.without(demand)

    def begin(self, demand: ResourceRequest, *, now: float) -> None:
        """A sandbox is started here; where others did not start, no further one until it is known how it goes."""
        self.take(demand)
        if self._failures:
            self.resumes_at = now + _RESTS.longest_delay_s

    def failed(self, *, now: float) -> None:
        """A sandbox did not start here: rest before the next one, longer each time."""
        self.resumes_at = now + (restart_delay(self._failures, _RESTS, now=now) or 0.0)
        self._rests_until = self.resumes_at
        self._failures = [*self._failures, now][1 - _RESTS.restarts :]

    def spared(self) -> None:
        """A sandbox did not start here by what was asked for, which says nothing of how the next start goes."""
        self.resumes_at = self._rests_until

    def started(self) -> None:
        """A sandbox started here."""
        self._failures.clear()
        self.resumes_at = self._rests_until = 0.0

    def fits(self, demand: ResourceRequest, freed: ResourceRequest | None = None) -> bool:
        """Say whether there is room for `demand`, once `freed` is given back."""
        used = self.used if freed is None else self.used.without(freed)
        return all(used[place] + demand[place] <= bound + _ROUNDING for place, bound in self._bounds)

    def could_hold(self, demand: ResourceRequest) -> bool:
        """Say whether there would be room for `demand` if nothing else were here."""
        return all(demand[place] <= bound + _ROUNDING for place, bound in self._bounds)

    def share(self, demand: ResourceRequest) -> float:
        """Return which share of its scarcest resource would be used with `demand` added."""
        used = self.used
        return max(((used[place] + demand[place]) / bound for place, bound in self._bounds if bound), default=0.0)

    def room(self, demand: ResourceRequest) -> float:
        """Return how many more sandboxes of this demand it can hold; infinity where nothing bounds them."""
        used = self.used
        counts = ((bound - used[place] + _ROUNDING) // demand[place] for place, bound in self._bounds if demand[place])
        return max(min(counts, default=math.inf), 0.0)


def usable(nodes: Collection[Node], demand: ResourceRequest, *, now: float) -> Collection[Node]:
    """Return the nodes without those that rest, unless no other could hold `demand`, were it empty.

    A node on which nothing starts would otherwise be the least loaded one, and get nearly all.
    """
    awake = [node for node in nodes if now >= node.resumes_at]
    if len(awake) == len(nodes) or any(node.could_hold(demand) for node in awake):
        return awake
    return nodes


def place(nodes: Iterable[Node], demand: ResourceRequest) -> Node | None:
    """Return the least loaded node that has room for `demand`, the one with the fewest boxes and the first among
    equals; None when none has.
    """
    fitting = (node for node in nodes if node.fits(demand))
    return min(fitting, key=lambda node: (node.share(demand), node.used.boxes), default=None)


def why_impossible(nodes: Collection[Node], demand: ResourceRequest) -> str | None:
    """Say which bound is too much for every node, were it empty, and what the largest holds; None if one could hold it.

    Nothing is impossible where there are no nodes yet.
    """
    if not nodes or any(node.could_hold(demand) for node in nodes):
        return None
    excesses = []
    for field in ResourceRequest._fields:
        asked, bounds = getattr(demand, field), [getattr(node.holds, field) for node in nodes]
        if None not in bounds and asked > max(bounds):
            excesses.append(f"{field}={asked:.12g} is more than any node holds: the largest holds {max(bounds):.12g}")
    if excesses:
        return "; ".join(excesses)
    asked_together = ", ".join(f"{field}={getattr(demand, field):.12g}" for field in ResourceRequest._fields[1:])
    return f"no node holds {asked_together} together"


def beyond_share(nodes: Collection[Node], demand: ResourceRequest, share: float) -> str | None:
    """Say which bound is too much for one who may have a share of what all nodes hold together, and how much that is.

    Args:
        nodes: All nodes.
        demand: What one has and wants, together.
        share: In (0, 1].

    Returns:
        None where nothing is too much. What one of the nodes does not count has no share.
    """
    for field in ResourceRequest._fields:
        bounds = [getattr(node.holds, field) for node in nodes]
        if bounds and None not in bounds and getattr(demand, field) > share * sum(bounds) + _ROUNDING:
            asked, most = getattr(demand, field), f"{share * sum(bounds):.12g}"
            return f"{field}={asked:.12g} together is more than {share:.0%} of what all nodes hold, which is {most}"
    return None


def cheapest_room(
    nodes: Iterable[Node], spares: Sequence[tuple[Node, ResourceRequest]], demand: ResourceRequest
) -> list[int] | None:
    """Return which spares, by their places in `spares`, to give up for `demand`: as few as possible, on one node.

    Args:
        nodes: All nodes.
        spares: Those that could be given up, the first ones rather than the last.
        demand: What room is needed for.

    Returns:
        None when all of them together would not be enough.
    """
    found: list[int] | None = None
    for node in nodes:
        freed, given_up = ResourceRequest(), []
        for number, (home, takes) in enumerate(spares):
            if home is node and not node.fits(demand, freed):
                freed = freed.with_other(takes)
                given_up.append(number)
        if node.fits(demand, freed) and (found is None or len(given_up) < len(found)):
            found = given_up
    return found
