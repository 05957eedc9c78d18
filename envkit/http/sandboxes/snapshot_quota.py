"""Snapshots of sandboxes: their owners, their names and the quota.

Snapshots are removed only on request: at the quota, a new one is rejected.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxNotFoundError, SnapshotLimitError
from envkit.protocols import SandboxPool

_REMOVE_S = 30.0
_WHAT_TO_DO = "remove one first: envkit sandbox snapshot rm --url URL NAME, or DELETE /v1/snapshots/NAME"


@dataclass(frozen=True, slots=True)
class SnapshotBounds:
    """Limits on the number of snapshots and their MiB, per tenant and for the whole server.

    Without tokens there are no tenants, and only the limits of the server apply.
    """

    per_tenant: int = 100
    per_tenant_mib: int = 4096
    total: int = 1000
    total_mib: int = 16384


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stored snapshot.

    Attributes:
        name: Its name for callers: random, since names of backends can be guessed.
        tenant: Its owner.
        sandbox_id: The sandbox it was taken of.
        at_s: When it was taken, seconds since 1970.
        bytes: Its size on disk.
        pool_id: Its name in the pool.
    """

    name: str
    tenant: str
    sandbox_id: str
    at_s: float
    bytes: int
    pool_id: str


class Snapshots:
    """The snapshots of a server.

    Args:
        pool: Stores them.
        bounds: The quota.
    """

    def __init__(self, pool: SandboxPool, bounds: SnapshotBounds) -> None:
        self._pool = pool
        self._bounds = bounds
        self._snapshots: dict[str, Snapshot] = {}
        self._in_progress: Counter[str] = Counter()

    async def keep(self, tenant: str, sandbox_id: str, take: Callable[[], Awaitable[str]]) -> str:
        """Take a snapshot and return its name.

        Args:
            tenant: Its owner.
            sandbox_id: The sandbox.
            take: Takes it and returns its name in the pool.

        Raises:
            SnapshotLimitError: The number of snapshots or their MiB would exceed a limit.
        """
        self._check_limits(tenant)
        self._in_progress[tenant] += 1
        try:
            pool_id = await take()
            try:
                size = await self._pool.snapshot_bytes(pool_id)
                self._check_size(tenant, size)
            except BaseException:
                await self._discard(pool_id)
                raise
        finally:
            self._in_progress[tenant] -= 1
        name = f"snapshot-{secrets.token_hex(16)}"
        self._snapshots[name] = Snapshot(name, tenant, sandbox_id, clock.wall(), size, pool_id)
        return name

    def pool_id(self, name: str, owner: str | None) -> str:
        """Return the name of a snapshot in the pool.

        Raises:
            SandboxNotFoundError: No snapshot of the tenant `owner` has this name; None means any tenant.
        """
        found = self._snapshots.get(name)
        if found is None or owner not in (None, found.tenant):
            raise SandboxNotFoundError(f"no snapshot {name[:200]!r}")
        return found.pool_id

    def all(self, owner: str | None) -> Sequence[Snapshot]:
        """Return the snapshots of the tenant `owner`, oldest first; None means any tenant."""
        return [one for one in self._snapshots.values() if owner in (None, one.tenant)]

    async def remove(self, name: str, owner: str | None) -> None:
        """Remove a snapshot if it belongs to the tenant `owner`; None means any tenant. Safe to repeat.

        Raises:
            EnvkitError: Removal failed; the snapshot still counts.
        """
        found = self._snapshots.get(name)
        if found is not None and owner in (None, found.tenant):
            await self._pool.remove_snapshot(found.pool_id)
            self._snapshots.pop(name, None)

    async def _discard(self, pool_id: str) -> None:
        """Remove a snapshot that its caller has not received. If that fails, closing the backend removes it."""
        with anyio.move_on_after(_REMOVE_S, shield=True), suppress(EnvkitError, OSError):
            await self._pool.remove_snapshot(pool_id)

    def _check_limits(self, tenant: str) -> None:
        """Reject a new snapshot at a limit. Snapshots in progress count."""
        for snapshots, in_progress, limit, limit_mib, owner in self._quotas(tenant):
            if len(snapshots) + in_progress >= limit:
                raise SnapshotLimitError(f"{owner} is at its limit of {limit} snapshots; {_WHAT_TO_DO}")
            if _total_bytes(snapshots) >= limit_mib << 20:
                raise SnapshotLimitError(f"{owner} is at its limit of {limit_mib} MiB of snapshots; {_WHAT_TO_DO}")

    def _check_size(self, tenant: str, size: int) -> None:
        """Reject a new snapshot of `size` bytes if it exceeds a limit."""
        for snapshots, _, _, limit_mib, owner in self._quotas(tenant):
            used = _total_bytes(snapshots)
            if used + size > limit_mib << 20:
                mib = f"{used >> 20} MiB used, limit {limit_mib} MiB"
                raise SnapshotLimitError(f"{owner}: no space for {-(-size >> 20)} MiB ({mib}); {_WHAT_TO_DO}")

    def _quotas(self, tenant: str) -> Iterator[tuple[Sequence[Snapshot], int, int, int, str]]:
        """Yield for each quota the snapshots that count, the number of snapshots in progress, both limits, and the name
        of the owner for errors.
        """
        bounds = self._bounds
        if tenant:
            owner = f"tenant {tenant!r}"
            yield self.all(tenant), self._in_progress[tenant], bounds.per_tenant, bounds.per_tenant_mib, owner
        yield self.all(None), self._in_progress.total(), bounds.total, bounds.total_mib, "this server"


def _total_bytes(snapshots: Sequence[Snapshot]) -> int:
    return sum(one.bytes for one in snapshots)
