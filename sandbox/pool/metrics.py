"""Counters of a pool, for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from envkit.types import CauseKind, SandboxState, TenantKey


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Numbers of a pool's current sandboxes and requests, and totals since the pool was opened.

    Attributes:
        states: Number of live sandboxes by state.
        warm: Number of warm sandboxes that are ready.
        starts: Total number of starts.
        failed_starts: Total number of failed starts, except those that failed because of the sandbox's spec.
        finished: Total number of tenants' sandboxes that ended because their command exited.
        losses: Total number of lost sandboxes by kind of cause.
        restarts: Total number of warm sandboxes that were replaced because their start failed or they were lost.
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
        """Count a sandbox that ended by itself as finished if `kind` is an exit and `may_exit` is set, else as lost."""
        if may_exit and kind is CauseKind.EXITED:
            self.finished += 1
        else:
            self.losses[kind] = self.losses.get(kind, 0) + 1
