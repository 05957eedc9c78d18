"""Offenders: environments whose episodes, for one tenant, repeatedly kill their sandboxes.

A loss of a sandbox that is attributed to an episode counts against the pair of the episode's tenant and environment.
After `FREE_LOSSES` losses of a pair within a time window, each new episode of the pair runs in a separate sandbox. If
more losses follow than the restart budget allows, new episodes are rejected until the oldest loss leaves the window.
"""

from __future__ import annotations

from collections import defaultdict

from envkit import clock
from envkit.errors import EnvRejectedError
from envkit.restarts import RestartBudget
from envkit.types import Cause

FREE_LOSSES = 3
"""Number of attributed losses after which each new episode runs in a sandbox of its own."""


class Offenders:
    """Counts the losses of sandboxes that are attributed to episodes, by tenant and environment.

    Args:
        budget: `window_s` is how long a loss counts. `restarts` is how many losses beyond `FREE_LOSSES` are allowed
            before new episodes are rejected.
    """

    def __init__(self, budget: RestartBudget) -> None:
        self._budget = budget
        self._losses: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._causes: dict[tuple[str, str], Cause] = {}

    def record(self, tenant: str, env_id: str, cause: Cause) -> None:
        """Count a loss that is attributed to an episode of this tenant and environment."""
        self._losses[tenant, env_id].append(clock.now())
        self._causes[tenant, env_id] = cause

    def is_isolated(self, tenant: str, env_id: str) -> bool:
        """Return whether each new episode of this tenant and environment must run in a sandbox of its own.

        Raises:
            EnvRejectedError: There were too many losses, so that new episodes are rejected.
        """
        if (tenant, env_id) not in self._losses:
            return False
        now, window_s = clock.now(), self._budget.window_s
        recent = [moment for moment in self._losses[tenant, env_id] if now - moment < window_s]
        if not recent:
            del self._losses[tenant, env_id], self._causes[tenant, env_id]
            return False
        self._losses[tenant, env_id] = recent
        if len(recent) >= FREE_LOSSES + self._budget.restarts:
            wait_s = recent[0] + window_s - now
            raise EnvRejectedError(env_id, len(recent), window_s, str(self._causes[tenant, env_id]), wait_s)
        return len(recent) >= FREE_LOSSES
