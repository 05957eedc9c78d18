"""Counters of sessions and steps, for the whole server and for each request."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Any

BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds of the buckets in which `SessionCounters` counts steps by duration, in seconds."""
_SHORTEST_S = BOUNDS_S[0]


class StepMetrics:
    """Counts the steps and sessions of one request or WebSocket, for the access log.

    Attributes:
        steps: Number of requested steps.
        envs: Number of created sessions for each environment id.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.envs: Counter[str] = Counter()


def step_metrics_of(scope: Mapping[str, Any]) -> StepMetrics:
    """Return the step metrics of a request. They are stored in its ASGI scope, where the access log reads them."""
    metrics: StepMetrics = scope.get("state", {}).setdefault("step_metrics", StepMetrics())
    return metrics


class SessionCounters:
    """Counters for all sessions of a server.

    The counters are plain numbers, because counting with a metrics library may take more time than a step.

    Attributes:
        sessions: Number of created sessions.
        step_seconds: Total duration of all steps in seconds, including failed steps.
        buckets: Number of steps by duration: one bucket for each upper bound in `BOUNDS_S`, and one for longer steps.
        errors: Number of error answers for each error code.
    """

    def __init__(self) -> None:
        self.sessions = 0
        self.step_seconds = 0.0
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.errors: Counter[str] = Counter()

    def step(self, seconds: float) -> None:
        self.step_seconds += seconds
        self.buckets[0 if seconds <= _SHORTEST_S else bisect_left(BOUNDS_S, seconds)] += 1
