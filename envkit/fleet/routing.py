"""Routing of tasks, by environment, to workers that play many episodes each or to workers that play only one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from envkit.fleet.offenders import Offenders
from envkit.protocols import Episode, ReadinessHost, ResumableHost
from envkit.types import Task, TenantKey


@dataclass(frozen=True, slots=True)
class RoutedHosts:
    """Sends each task to one of two hosts, depending on its environment; implements `envkit.protocols.ResumableHost`.

    Attributes:
        shared: Host whose workers each play many episodes.
        own: Host whose workers each play only one episode.
        is_shareable: Returns whether `shared` may play the environment with this id.
        offenders: Environments that `own` must play for certain tenants, because of the sandboxes that they killed.
        is_own_counted: Whether `capacity` includes the capacity of `own`.
    """

    shared: ResumableHost
    own: ResumableHost
    is_shareable: Callable[[str], bool]
    offenders: Offenders
    is_own_counted: bool = True

    @property
    def capacity(self) -> int:
        return self.shared.capacity + (self.own.capacity if self.is_own_counted else 0)

    @property
    def why_unready(self) -> str:
        """Why no worker of `shared` is healthy; empty if at least one is. The workers of `own` start only on demand."""
        return self.shared.why_unready if isinstance(self.shared, ReadinessHost) else ""

    def lease(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        return self._host_of(task, "").lease(task)

    def lease_as(self, key: TenantKey, task: Task) -> AbstractAsyncContextManager[Episode]:
        host = self.own if self.own.resumable_task(key) == task else self._host_of(task, key.tenant)
        return host.lease_as(key, task)

    def resumable_task(self, key: TenantKey) -> Task | None:
        return self.shared.resumable_task(key) or self.own.resumable_task(key)

    def resumable_keys(self) -> Sequence[TenantKey]:
        return [*self.shared.resumable_keys(), *self.own.resumable_keys()]

    def _host_of(self, task: Task, tenant: str) -> ResumableHost:
        """Return the host for a new episode.

        Raises:
            EnvRejectedError: New episodes of this environment are rejected.
        """
        is_isolated = self.offenders.is_isolated(tenant, task.env_id)
        return self.own if is_isolated or not self.is_shareable(task.env_id) else self.shared
