"""Snapshots of sandboxes: who owns them, how callers name them, and how many are allowed.

The server never removes a snapshot on its own. When a limit is reached, new snapshots are rejected.
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
from envkit.types import TenantKey

_REMOVE_S = 30.0
_WHAT_TO_DO = "remove one first: envkit sandbox snapshot rm --url URL NAME, or DELETE /v1/snapshots/NAME"


@dataclass(frozen=True, slots=True)
class SnapshotBounds:
    """Limits on the number of snapshots and their total size in MiB, for each tenant and for the whole server.

    A server without tokens has no tenants, so only the limits for the whole server apply.
    """

    per_tenant: int = 100
    per_tenant_mib: int = 4096
    total: int = 1000
    total_mib: int = 16384


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stored snapshot.

    Attributes:
        name: Name that callers use. It is random, because the names that sandbox backends choose can be guessed.
        key: Sandbox of which the snapshot was taken; its tenant owns the snapshot.
        at_s: Time at which the snapshot was taken, in seconds since 1970.
        bytes: Size on disk, in bytes.
        pool_id: Name of the snapshot in the sandbox pool.
    """

    name: str
    key: TenantKey
    at_s: float
    bytes: int
    pool_id: str


class Snapshots:
    """The snapshots of a server.

    Args:
        pool: Pool that stores the snapshots.
        bounds: Limits on the number and size of snapshots.
    """

    def __init__(self, pool: SandboxPool, bounds: SnapshotBounds) -> None:
        self._pool = pool
        self._bounds = bounds
        self._snapshots: dict[str, Snapshot] = {}
        self._in_progress: Counter[str] = Counter()

    async def keep(self, key: TenantKey, take: Callable[[], Awaitable[str]]) -> str:
        """Take a snapshot of a sandbox and return its name for callers.

        Args:
            key: The sandbox, whose tenant owns the snapshot.
            take: Function that takes the snapshot and returns its name in the pool.

        Raises:
            SnapshotLimitError: The number of snapshots or their total size would exceed a limit.
        """
        tenant = key.tenant
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
        self._snapshots[name] = Snapshot(name, key, clock.wall(), size, pool_id)
        return name

    def pool_id(self, name: str, owner: str | None) -> str:
        """Return the name that the pool uses for the snapshot `name`.

        Raises:
            SandboxNotFoundError: No snapshot of the tenant `owner`, or of any tenant if `owner` is None, has this name.
        """
        found = self._snapshots.get(name)
        if found is None or owner not in (None, found.key.tenant):
            raise SandboxNotFoundError(f"no snapshot {name[:200]!r}")
        return found.pool_id

    def all(self, owner: str | None) -> Sequence[Snapshot]:
        """Return the snapshots of the tenant `owner`, or all snapshots if `owner` is None, oldest first."""
        return [one for one in self._snapshots.values() if owner in (None, one.key.tenant)]

    async def remove(self, name: str, owner: str | None) -> None:
        """Remove a snapshot if it belongs to the tenant `owner`, or if `owner` is None. The call is safe to repeat.

        Raises:
            EnvkitError: The removal failed. The snapshot still exists and counts towards the limits.
        """
        found = self._snapshots.get(name)
        if found is not None and owner in (None, found.key.tenant):
            await self._pool.remove_snapshot(found.pool_id)
            self._snapshots.pop(name, None)

    async def _discard(self, pool_id: str) -> None:
        """Remove a snapshot whose name no caller received. If this fails, the backend removes the snapshot when the
        backend closes.
        """
        with anyio.move_on_after(_REMOVE_S, shield=True), suppress(EnvkitError, OSError):
            await self._pool.remove_snapshot(pool_id)

    def _check_limits(self, tenant: str) -> None:
        """Raise an error if a limit on snapshots is reached. Snapshots that are being taken count too."""
        for snapshots, in_progress, limit, limit_mib, owner in self._quotas(tenant):
            if len(snapshots) + in_progress >= limit:
                raise SnapshotLimitError(f"{owner} is at its limit of {limit} snapshots; {_WHAT_TO_DO}")
            if _total_bytes(snapshots) >= limit_mib << 20:
                raise SnapshotLimitError(f"{owner} is at its limit of {limit_mib} MiB of snapshots; {_WHAT_TO_DO}")

    def _check_size(self, tenant: str, size: int) -> None:
        """Raise an error if a new snapshot of `size` bytes would exceed a limit."""
        for snapshots, _, _, limit_mib, owner in self._quotas(tenant):
            used = _total_bytes(snapshots)
            if used + size > limit_mib << 20:
                mib = f"{used >> 20} MiB used, limit {limit_mib} MiB"
                raise SnapshotLimitError(f"{owner}: no space for {-(-size >> 20)} MiB ({mib}); {_WHAT_TO_DO}")

    def _quotas(self, tenant: str) -> Iterator[tuple[Sequence[Snapshot], int, int, int, str]]:
        """Yield a tuple for the tenant, unless its name is empty, and a tuple for the whole server.

        Each tuple contains the stored snapshots, the number of snapshots that are being taken, the limit on the number,
        the limit in MiB, and the name of the tenant or server for errors.
        """
        bounds = self._bounds
        if tenant:
            owner = f"tenant {tenant!r}"
            yield self.all(tenant), self._in_progress[tenant], bounds.per_tenant, bounds.per_tenant_mib, owner
        yield self.all(None), self._in_progress.total(), bounds.total, bounds.total_mib, "this server"


def _total_bytes(snapshots: Sequence[Snapshot]) -> int:
    return sum(one.bytes for one in snapshots)
