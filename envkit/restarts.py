"""When what was lost is replaced: a function of what happened before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """How often boxes may be replaced.

    Attributes:
        restarts: Replacements within one window.
        window_s: Length of the window in seconds.
        first_delay_s: Seconds before the first replacement in a window; each further one waits twice as long.
        longest_delay_s: Bound on that, in seconds.
    """

    restarts: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.1
    longest_delay_s: float = 30.0


def restart_delay(history: Sequence[float], budget: RestartBudget, *, now: float) -> float | None:
    """Return how many seconds to wait before the next replacement, or None when the budget is spent.

    Args:
        history: When boxes were replaced, on the clock of `now`.
        budget: What is allowed.
        now: The time, in seconds.
    """
    recent = sum(now - moment < budget.window_s for moment in history)
    if recent >= budget.restarts:
        return None
    return float(min(budget.first_delay_s * 2**recent, budget.longest_delay_s))


class Replacement(NamedTuple):
    """When something is replaced.

    Attributes:
        at: The moment.
        is_late: Whether the budget was spent, so that this is when the oldest failure leaves the window; never, if
            nothing is ever replaced.
    """

    at: float
    is_late: bool


class Failures:
    """What failed, as far as it still counts."""

    def __init__(self) -> None:
        self._moments: list[float] = []

    def add(self, budget: RestartBudget, *, now: float) -> Replacement:
        """Something failed: say when it is to be replaced."""
        self._moments = [moment for moment in self._moments if now - moment < budget.window_s]
        delay_s = restart_delay(self._moments, budget, now=now)
        if delay_s is None:
            return Replacement(min(self._moments, default=math.inf) + budget.window_s, is_late=True)
        self._moments.append(now)
        return Replacement(now + delay_s, is_late=False)
