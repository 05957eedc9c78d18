"""Counters of a running server, and of what each request plays."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Any

BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds of the buckets of step durations, in seconds."""
_SHORTEST_S = BOUNDS_S[0]


class StepMetrics:
    """Steps and sessions of one request or socket, for the access log.

    Attributes:
        steps: Steps requested.
        envs: Sessions created, by environment.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.envs: Counter[str] = Counter()


def step_metrics_of(scope: Mapping[str, Any]) -> StepMetrics:
    """Return the step metrics of an ASGI scope's request, which the access log reads from the scope's state."""
    metrics: StepMetrics = scope.get("state", {}).setdefault("step_metrics", StepMetrics())
    return metrics


class SessionCounters:
    """Counters of all sessions of a server. Plain numbers: a metrics library may cost more time than a step.

    Attributes:
        sessions: Sessions created.
        step_seconds: Total seconds of all steps, including failed ones.
        buckets: Number of steps per bucket: one for each of `BOUNDS_S`, and one for longer steps.
        errors: Error responses, by code.
    """

    def __init__(self) -> None:
        self.sessions = 0
        self.step_seconds = 0.0
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.errors: Counter[str] = Counter()

    def step(self, seconds: float) -> None:
        self.step_seconds += seconds
        self.buckets[0 if seconds <= _SHORTEST_S else bisect_left(BOUNDS_S, seconds)] += 1
