"""Sandboxes that are prepared once, and then started from a snapshot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from weakref import WeakKeyDictionary

import anyio

from envkit.errors import (
    CapacityError,
    EnvkitError,
    SandboxLostError,
    SandboxNotFoundError,
    SandboxRefusedError,
)
from envkit.protocols import Sandbox, SandboxPool
from envkit.types import SandboxSpec

from ..tools.limits import LEASE_S

MAX_SNAPSHOTS = 32
"""Maximum number of snapshots per pool; the one that was not used for the longest time is removed."""

SNAPSHOT_WAIT_S = 5.0
"""Maximum seconds to wait for room on the node of a snapshot; then another node prepares the sandbox."""


class _Snapshots:
    """The snapshots of a pool: names by key; None if no snapshot can be taken."""

    def __init__(self) -> None:
        self.names: OrderedDict[Hashable, str | None] = OrderedDict()
        self.locks: dict[Hashable, anyio.Lock] = {}


_OF_POOL: WeakKeyDictionary[SandboxPool, _Snapshots] = WeakKeyDictionary()


@asynccontextmanager
async def lease_prepared(
    sandboxes: SandboxPool, spec: SandboxSpec, key: Hashable, prepare: Callable[[Sandbox], Awaitable[None]]
) -> AsyncIterator[Sandbox]:
    """Lease a sandbox in which `prepare` has run: from a snapshot, if one with this key exists.

    The first lease with a key prepares its sandbox and takes the snapshot. If the sandboxes have no snapshots, or the
    node of the snapshot has no room, a lease prepares its sandbox. Call `remove_prepared` before the pool is closed, if
    the pool does not remove snapshots by itself.

    Args:
        sandboxes: Leases the sandboxes.
        spec: Spec of the sandbox.
        key: All that the result of `prepare` depends on, apart from the spec.
        prepare: Writes the files of the sandbox, below ``/workspace`` and ``/tmp``.

    Raises:
        The errors of `SandboxPool.lease` and of `prepare`.
    """
    known = _OF_POOL.setdefault(sandboxes, _Snapshots())
    full_key = (key, spec.image, spec.views, spec.profile)
    async with AsyncExitStack() as stack:
        sandbox: Sandbox | None = None
        async with known.locks.setdefault(full_key, anyio.Lock()):
            if full_key not in known.names:
                sandbox = await stack.enter_async_context(sandboxes.lease(spec, wait_s=LEASE_S))
                await prepare(sandbox)
                known.names[full_key] = await _snapshot(sandbox)
        name = known.names.get(full_key)
        if sandbox is None and name is not None:
            known.names.move_to_end(full_key)
            lease = sandboxes.lease(spec, wait_s=SNAPSHOT_WAIT_S, snapshot=name)
            try:
                sandbox = await stack.enter_async_context(lease)
            except CapacityError:
                pass
            except (SandboxRefusedError, SandboxNotFoundError):  # it was removed meanwhile, or its node is gone
                if known.names.get(full_key) == name:
                    del known.names[full_key]
        if sandbox is None:
            sandbox = await stack.enter_async_context(sandboxes.lease(spec, wait_s=LEASE_S))
            await prepare(sandbox)
        await _evict(sandboxes, known, keep=MAX_SNAPSHOTS)
        yield sandbox


async def _snapshot(sandbox: Sandbox) -> str | None:
    try:
        return await sandbox.snapshot()
    except SandboxLostError:
        raise
    except EnvkitError:  # not supported, or too large
        return None


async def remove_prepared(sandboxes: SandboxPool) -> None:
    """Remove all snapshots of a pool."""
    if (known := _OF_POOL.get(sandboxes)) is not None:
        await _evict(sandboxes, known, keep=0)


async def _evict(sandboxes: SandboxPool, known: _Snapshots, keep: int) -> None:
    while len(known.names) > keep:
        key, name = known.names.popitem(last=False)
        known.locks.pop(key, None)
        if name is not None:
            with suppress(EnvkitError):
                await sandboxes.remove_snapshot(name)
