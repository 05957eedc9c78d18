"""Files of sandboxes that were kept: whose they are, what they are called, and how many there may be.

Nothing is removed unasked: where there may be no more, a further one is refused.
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
    """How many snapshots there may be, and how many MiB they may have, of one tenant and of all together.

    Without tokens there are no tenants, and only what all have together is bounded.
    """

    per_tenant: int = 100
    per_tenant_mib: int = 4096
    in_all: int = 1000
    in_all_mib: int = 16384


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Kept files.

    Attributes:
        name: What callers call it; nobody can guess it, since the names of backends can be guessed.
        tenant: Whose it is.
        sandbox_id: Name of the sandbox whose files they are.
        at_s: When they were kept, seconds since 1970.
        bytes: What it takes of a disk.
        known: What the pool knows it as.
    """

    name: str
    tenant: str
    sandbox_id: str
    at_s: float
    bytes: int
    known: str


class Snapshots:
    """The snapshots of a server.

    Args:
        pool: Has them.
        bounds: How many there may be.
    """

    def __init__(self, pool: SandboxPool, bounds: SnapshotBounds) -> None:
        self._pool = pool
        self._bounds = bounds
        self._kept: dict[str, Snapshot] = {}
        self._coming: Counter[str] = Counter()

    async def keep(self, tenant: str, sandbox_id: str, take: Callable[[], Awaitable[str]]) -> str:
        """Take a snapshot, and return its name.

        Args:
            tenant: Whose it is to be.
            sandbox_id: Of which sandbox.
            take: Takes it, and returns what the pool knows it as.

        Raises:
            SnapshotLimitError: There may be no more, or not one as large as this one is.
        """
        self._require_room(tenant)
        self._coming[tenant] += 1
        try:
            known = await take()
            try:
                size = await self._pool.snapshot_bytes(known)
                self._require_room_for(tenant, size)
            except BaseException:
                await self._remove(known)
                raise
        finally:
            self._coming[tenant] -= 1
        name = f"snapshot-{secrets.token_hex(16)}"
        self._kept[name] = Snapshot(name, tenant, sandbox_id, clock.wall(), size, known)
        return name

    def known(self, name: str, seen: str | None) -> str:
        """Return what the pool knows it as.

        Raises:
            SandboxNotFoundError: It is nobody's, or not of the tenant `seen`; None is any.
        """
        found = self._kept.get(name)
        if found is None or seen not in (None, found.tenant):
            raise SandboxNotFoundError(f"there is no snapshot {name[:200]!r}")
        return found.known

    def all(self, seen: str | None) -> Sequence[Snapshot]:
        """Return those of the tenant `seen`, oldest first; None is any."""
        return [one for one in self._kept.values() if seen in (None, one.tenant)]

    async def remove(self, name: str, seen: str | None) -> None:
        """Remove one, if it is of the tenant `seen`; None is any. Safe to repeat.

        Raises:
            EnvkitError: It could not be removed, and still counts.
        """
        found = self._kept.get(name)
        if found is not None and seen in (None, found.tenant):
            await self._pool.remove_snapshot(found.known)
            self._kept.pop(name, None)

    async def _remove(self, known: str) -> None:
        """Remove what nobody gets to know; what fails now is removed when its backend is closed."""
        with anyio.move_on_after(_REMOVE_S, shield=True), suppress(EnvkitError, OSError):
            await self._pool.remove_snapshot(known)

    def _require_room(self, tenant: str) -> None:
        """Refuse a further one. Those that are being taken count."""
        for kept, coming, most, most_mib, who in self._books(tenant):
            if len(kept) + coming >= most:
                raise SnapshotLimitError(f"no snapshot: {who} the {most} that there may be; {_WHAT_TO_DO}")
            if (taken := _taken(kept)) >= most_mib << 20:
                raise SnapshotLimitError(
                    f"no snapshot: {who} {taken >> 20} MiB of them, and there may be {most_mib}; {_WHAT_TO_DO}"
                )

    def _require_room_for(self, tenant: str, size: int) -> None:
        """Refuse a further one of `size` bytes."""
        for kept, _, _, most_mib, who in self._books(tenant):
            taken = _taken(kept)
            if taken + size > most_mib << 20:
                mib = f"{taken >> 20} MiB of them, this one has {-(-size >> 20)}"
                raise SnapshotLimitError(f"no snapshot: {who} {mib}, and there may be {most_mib}; {_WHAT_TO_DO}")

    def _books(self, tenant: str) -> Iterator[tuple[Sequence[Snapshot], int, int, int, str]]:
        """What is counted together: the snapshots, how many are being taken, how many and MiB may be, and whose."""
        bounds = self._bounds
        if tenant:
            who = f"tenant {tenant!r} has"
            yield self.all(tenant), self._coming[tenant], bounds.per_tenant, bounds.per_tenant_mib, who
        yield self.all(None), self._coming.total(), bounds.in_all, bounds.in_all_mib, "this server has"


def _taken(kept: Sequence[Snapshot]) -> int:
    return sum(one.bytes for one in kept)
