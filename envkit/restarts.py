"""When to restart something that failed: a limited number of restarts, with growing delays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


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


def restart_delay(history: Sequence[float], budget: RestartBudget, *, now: float) -> float | None:
    """Return the delay in seconds before the next restart, or None if the budget does not allow another restart.

    Args:
        history: Times of earlier restarts, on the same clock as `now`.
        budget: The restart budget.
        now: The current time in seconds.
    """
    recent = sum(now - moment < budget.window_s for moment in history)
    if recent >= budget.restarts:
        return None
    # Larger powers of two would exceed the range of floats.
    return float(min(budget.first_delay_s * 2 ** min(recent, 63), budget.longest_delay_s))


class Replacement(NamedTuple):
    """When something that failed is restarted.

    Attributes:
        at: Time of the restart; infinity if the budget allows no restarts at all.
        is_late: Whether the restart has to wait until the oldest failure leaves the window, because of the budget.
    """

    at: float
    is_late: bool


class Excuse(Protocol):
    """An object, such as an `anyio.Event`, that is set when a failure must no longer count against the budget."""

    def is_set(self) -> bool: ...


class Failures:
    """The recent failures of something that is restarted after each failure."""

    def __init__(self) -> None:
        self._failures: list[tuple[float, Excuse | None]] = []

    def add(self, budget: RestartBudget, *, now: float, excuse: Excuse | None = None) -> Replacement:
        """Record a failure and return the time of the restart.

        Args:
            budget: The restart budget.
            now: The current time in seconds.
            excuse: If it is set later, the failure no longer counts against the budget.
        """
        self._failures = [failure for failure in self._failures if _counts(failure, budget, now)]
        moments = [moment for moment, _ in self._failures]
        delay_s = restart_delay(moments, budget, now=now)
        if delay_s is None:
            return Replacement(min(moments, default=math.inf) + budget.window_s, is_late=True)
        self._failures.append((now, excuse))
        return Replacement(now + delay_s, is_late=False)


def _counts(failure: tuple[float, Excuse | None], budget: RestartBudget, now: float) -> bool:
    moment, excuse = failure
    return now - moment < budget.window_s and not (excuse is not None and excuse.is_set())
