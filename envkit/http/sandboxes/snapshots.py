"""Snapshots of sandboxes: who owns them, and how callers name them. The server never removes one on its own."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from envkit import clock
from envkit.errors import SandboxNotFoundError
from envkit.protocols import SandboxPool
from envkit.types import TenantKey


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
    """The snapshots of a server, which `pool` stores."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._snapshots: dict[str, Snapshot] = {}

    async def keep(self, key: TenantKey, take: Callable[[], Awaitable[str]]) -> str:
        """Take a snapshot of a sandbox and return its name for callers.

        Args:
            key: The sandbox, whose tenant owns the snapshot.
            take: Function that takes the snapshot and returns its name in the pool.
        """
        pool_id = await take()
        size = await self._pool.snapshot_bytes(pool_id)
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
            EnvkitError: The removal failed. The snapshot still exists.
        """
        found = self._snapshots.get(name)
        if found is not None and owner in (None, found.key.tenant):
            await self._pool.remove_snapshot(found.pool_id)
            self._snapshots.pop(name, None)
