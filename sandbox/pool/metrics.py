"""Counters of a pool, for metrics and autoscaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from envkit.types import CauseKind, SandboxState, TenantKey


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Counts for the current state of a pool, and totals since it was opened.

    Attributes:
        states: Number of live sandboxes by state.
        warm: Number of warm sandboxes that are ready.
        starts: Total number of starts.
        failed_starts: Total number of failed starts, except those that failed because of the request.
        finished: Total number of tenants' sandboxes that ended because their command exited.
        losses: Total number of lost sandboxes by kind of cause.
        restarts: Total number of warm sandboxes that were replaced because they did not start or were lost.
        waiting: Number of waiting requests by tenant.
        alerts: Total number of alerts by kind.
        probe_s: Duration of the last probe in seconds, by sandbox.
    """

    states: Mapping[SandboxState, int]
    warm: int
    starts: int
    failed_starts: int
    finished: int
    losses: Mapping[CauseKind, int]
    restarts: int
    waiting: Mapping[str, int]
    alerts: Mapping[str, int]
    probe_s: Mapping[TenantKey, float]


@dataclass(slots=True)
class PoolTally:
    """Totals since a pool was opened; see `PoolCounts` for the fields."""

    starts: int = 0
    failed_starts: int = 0
    restarts: int = 0
    finished: int = 0
    losses: dict[CauseKind, int] = field(default_factory=dict)

    def over(self, kind: CauseKind, *, may_exit: bool) -> None:
        """Count a sandbox that ended by itself: as finished if it exited and `may_exit`, otherwise as lost."""
        if may_exit and kind is CauseKind.EXITED:
            self.finished += 1
        else:
            self.losses[kind] = self.losses.get(kind, 0) + 1


def wanted(*, missing: int, free: float) -> int:
    """Return how many more sandboxes the nodes need room for; a negative number is surplus room.

    Args:
        missing: Number of leases and warm sandboxes that wait for capacity.
        free: Number of sandboxes that still fit; infinity means no limit.
    """
    return 0 if math.isinf(free) else missing - int(free)
