"""Routing of tasks, by environment, to shared workers, to workers that play only one episode, or to a trusted one.

Offenders are environments whose episodes, for one tenant, repeatedly kill their sandboxes. A loss that is attributed to
an episode counts against the pair of its tenant and environment. After `FREE_LOSSES` losses of a pair within a time
window, each new episode of the pair runs in a separate sandbox. If more losses follow than the restart budget allows,
new episodes are rejected until the oldest loss leaves the window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from envkit import clock
from envkit.errors import EnvRejectedError
from envkit.protocols import EnvHost, Episode
from envkit.restarts import RestartBudget
from envkit.types import Cause, Task, TenantKey

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


@dataclass(frozen=True, slots=True)
class RoutedHosts(EnvHost):
    """Sends each task to a host, depending on its environment.

    Attributes:
        shared: Host whose workers each play many episodes.
        own: Host whose workers each play only one episode.
        is_shareable: Returns whether `shared` may play the environment with this id.
        offenders: Environments that `own` must play for certain tenants, because of the sandboxes that they killed.
        is_own_counted: Whether `capacity` includes the capacity of `own`.
        trusted: Host whose worker has access to the pool; None if no environment needs it.
        is_trusted: Returns whether `trusted` must play the environment with this id; raises an error to refuse it.
    """

    shared: EnvHost
    own: EnvHost
    is_shareable: Callable[[str], bool]
    offenders: Offenders
    is_own_counted: bool = True
    trusted: EnvHost | None = None
    is_trusted: Callable[[str], bool] = lambda env_id: False

    @property
    def capacity(self) -> int:
        trusted = 0 if self.trusted is None else self.trusted.capacity
        return self.shared.capacity + trusted + (self.own.capacity if self.is_own_counted else 0)

    @property
    def why_unready(self) -> str:
        """Why no worker of `shared` is healthy; empty if at least one is. The workers of `own` start only on demand."""
        return self.shared.why_unready

    def lease(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        return self._host_of(task.env_id, "").lease(task)

    def lease_as(self, key: TenantKey, task: Task) -> AbstractAsyncContextManager[Episode]:
        host = self.own if self.own.resumable_task(key) == task else self._host_of(task.env_id, key.tenant)
        return host.lease_as(key, task)

    def partition_of(self, env_id: str, tenant: str) -> tuple[str, int]:
        host = self._host_of(env_id, tenant)
        if host is self.trusted:
            return "environments with tools", host.capacity
        return "environments in their own sandboxes" if host is self.own else "environments", host.capacity

    def resumable_task(self, key: TenantKey) -> Task | None:
        return self.shared.resumable_task(key) or self.own.resumable_task(key)

    def resumable_keys(self) -> Sequence[TenantKey]:
        return [*self.shared.resumable_keys(), *self.own.resumable_keys()]

    def _host_of(self, env_id: str, tenant: str) -> EnvHost:
        """Return the host for a new episode.

        Raises:
            EnvRejectedError: New episodes of this environment are rejected.
            ForbiddenError: The environment needs sandboxes, and the configuration does not allow it to use them.
        """
        is_isolated = self.offenders.is_isolated(tenant, env_id)
        if self.is_trusted(env_id):
            assert self.trusted is not None
            return self.trusted
        return self.own if is_isolated or not self.is_shareable(env_id) else self.shared
