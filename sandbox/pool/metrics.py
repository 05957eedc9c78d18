"""What a pool counts, for metrics and for who decides how many nodes there should be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from envkit.types import CauseKind, SandboxState


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How a pool does now, and what has happened since it was opened.

    Attributes:
        states: Sandboxes by state; those that are over are not among them.
        spares: Those that are ready and not lent.
        starts: Starts that were begun.
        failed_starts: Those that failed, but for those by what was asked for.
        finished: Sandboxes of callers that ended because their command exited.
        losses: Sandboxes that were lost, by the kind of the cause.
        restarts: Spares that were replaced because they failed or died.
        waiting: Who waits for a sandbox, by tenant.
        alerts: What was to be looked at, by kind.
        probe_s: How long the last probe took, in seconds, by sandbox.
    """

    states: Mapping[SandboxState, int]
    spares: int
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
    """What has happened since a pool was opened; the names are those of `PoolCounts`."""

    starts: int = 0
    failed_starts: int = 0
    restarts: int = 0
    finished: int = 0
    losses: dict[CauseKind, int] = field(default_factory=dict)

    def over(self, kind: CauseKind, *, may_exit: bool) -> None:
        """Count a sandbox that ended by itself: as finished where its command has exited and may, otherwise as lost."""
        if may_exit and kind is CauseKind.EXITED:
            self.finished += 1
        else:
            self.losses[kind] = self.losses.get(kind, 0) + 1


def wanted(*, missing: int, free: float) -> int:
    """Return how many more boxes there should be room for, or, negative, how many fewer would do.

    Args:
        missing: Leases and spares that wait for room.
        free: Boxes that there is room for; infinity where that is not bounded.
    """
    return 0 if math.isinf(free) else missing - int(free)
