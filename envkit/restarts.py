"""When to restart something that failed: a limited number of restarts, with growing delays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import anyio


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """Limit on restarts within a time window, with exponential backoff.

    Attributes:
        restarts: Maximum number of restarts within one window.
        window_s: Length of the window in seconds.
        first_delay_s: Seconds before the first restart in a window. The delay doubles with each further restart in it.
        longest_delay_s: Maximum delay in seconds.
    """

    restarts: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.1
    longest_delay_s: float = 30.0


class Replacement(NamedTuple):
    """When something that failed is restarted.

    Attributes:
        at: Time of the restart; infinity if the budget allows no restarts at all.
        spent: Text that says that the budget is spent, so that the restart waits until the oldest failure leaves the
            window. Empty if it is not.
    """

    at: float
    spent: str


class Failures:
    """The recent failures of something that is restarted after each failure."""

    def __init__(self) -> None:
        self._failures: list[tuple[float, anyio.Event | None]] = []

    def add(self, budget: RestartBudget, *, now: float, excuse: anyio.Event | None = None) -> Replacement:
        """Record a failure and return the time of the restart.

        Args:
            budget: The restart budget.
            now: The current time in seconds.
            excuse: If it is set later, the failure no longer counts against the budget.
        """
        self._failures = [
            (moment, other)
            for moment, other in self._failures
            if now - moment < budget.window_s and not (other is not None and other.is_set())
        ]
        count = len(self._failures)
        if count >= budget.restarts:
            oldest = min((moment for moment, _ in self._failures), default=math.inf)
            return Replacement(oldest + budget.window_s, f"restart budget spent ({count} in {budget.window_s:g} s)")
        self._failures.append((now, excuse))
        # Larger powers of two would exceed the range of floats.
        delay_s = min(budget.first_delay_s * 2 ** min(count, 63), budget.longest_delay_s)
        return Replacement(now + delay_s, "")
