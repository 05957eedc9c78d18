"""Counters of a pool, for metrics and autoscaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from envkit.types import CauseKind, SandboxState


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Current state of a pool, and totals since it was opened.

    Attributes:
        states: Live sandboxes by state.
        warm: Warm sandboxes that are ready and not leased.
        starts: Starts begun.
        failed_starts: Failed starts, without those caused by the request itself.
        finished: Sandboxes of callers that ended because their command exited.
        losses: Lost sandboxes by kind of cause.
        restarts: Replacements of warm sandboxes that did not start or were lost.
        waiting: Waiting requests by tenant.
        alerts: Alerts by kind.
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
    probe_s: Mapping[str, float]


@dataclass(slots=True)
class PoolTally:
    """Totals since a pool was opened; for the fields see `PoolCounts`."""

    starts: int = 0
    failed_starts: int = 0
    restarts: int = 0
    finished: int = 0
    losses: dict[CauseKind, int] = field(default_factory=dict)

    def over(self, kind: CauseKind, *, may_exit: bool) -> None:
        """Count a sandbox that ended by itself: as finished if its command exited and `may_exit`, otherwise as lost."""
        if may_exit and kind is CauseKind.EXITED:
            self.finished += 1
        else:
            self.losses[kind] = self.losses.get(kind, 0) + 1


def wanted(*, missing: int, free: float) -> int:
    """Return the number of sandboxes by which capacity should grow, or, negative, may shrink.

    Args:
        missing: Leases and warm sandboxes that wait for capacity.
        free: Sandboxes that still fit; infinity if unbounded.
    """
    return 0 if math.isinf(free) else missing - int(free)
