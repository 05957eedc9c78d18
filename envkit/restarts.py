"""Restart budget and backoff."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """Restart budget with exponential backoff.

    Attributes:
        restarts: Restarts within one window.
        window_s: Length of the window in seconds.
        first_delay_s: Seconds before the first restart in a window; the delay doubles with each further restart.
        longest_delay_s: Maximum delay in seconds.
    """

    restarts: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.1
    longest_delay_s: float = 30.0


def restart_delay(history: Sequence[float], budget: RestartBudget, *, now: float) -> float | None:
    """Return the delay in seconds before the next restart, or None if the budget is spent.

    Args:
        history: Times of earlier restarts, on the clock of `now`.
        budget: The restart budget.
        now: The current time in seconds.
    """
    recent = sum(now - moment < budget.window_s for moment in history)
    if recent >= budget.restarts:
        return None
    return float(min(budget.first_delay_s * 2**recent, budget.longest_delay_s))


class Replacement(NamedTuple):
    """When to restart.

    Attributes:
        at: Time of the restart; infinity if there is no restart.
        is_late: Whether the budget is spent; if so, `at` is the time when the oldest failure leaves the window.
    """

    at: float
    is_late: bool


class Failures:
    """Failures within the current window."""

    def __init__(self) -> None:
        self._moments: list[float] = []

    def add(self, budget: RestartBudget, *, now: float) -> Replacement:
        """Record a failure and return the time of the restart."""
        self._moments = [moment for moment in self._moments if now - moment < budget.window_s]
        delay_s = restart_delay(self._moments, budget, now=now)
        if delay_s is None:
            return Replacement(min(self._moments, default=math.inf) + budget.window_s, is_late=True)
        self._moments.append(now)
        return Replacement(now + delay_s, is_late=False)
