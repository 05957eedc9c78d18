"""Offenders: environments of a tenant whose episodes keep killing their sandboxes.

Each loss of a sandbox that is attributed to an episode counts against the episode's tenant and environment. After
`FREE_LOSSES` of them within the window, their new episodes run in sandboxes of their own. After as many further losses
as the restart budget allows, new episodes are rejected until the oldest loss leaves the window.
"""

from __future__ import annotations

from collections import defaultdict

from envkit import clock
from envkit.errors import EnvRejectedError
from envkit.restarts import RestartBudget
from envkit.types import Cause

FREE_LOSSES = 3
"""Attributed losses after which episodes run in sandboxes of their own."""


class Offenders:
    """Counts attributed losses by tenant and environment.

    Args:
        budget: Its window, and the number of losses in sandboxes of their own before new episodes are rejected.
    """

    def __init__(self, budget: RestartBudget) -> None:
        self._budget = budget
        self._losses: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._causes: dict[tuple[str, str], Cause] = {}

    def record(self, tenant: str, env_id: str, cause: Cause) -> None:
        """Count a loss that is attributed to an episode."""
        self._losses[tenant, env_id].append(clock.now())
        self._causes[tenant, env_id] = cause

    def is_isolated(self, tenant: str, env_id: str) -> bool:
        """Return whether new episodes run in sandboxes of their own.

        Raises:
            EnvRejectedError: New episodes are rejected.
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
