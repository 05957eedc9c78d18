"""Pools of scripted sandboxes for the tests of tools and graders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from envkit.sandbox import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.types import Cause, CauseKind
from tests.sandbox.fake.backend import FakeBackend, Fate

OUT_OF_MEMORY = Cause(CauseKind.OUT_OF_MEMORY, "out of memory (limit 64 MiB)", by_agent=True)
NODE_LOST = Cause(CauseKind.NODE_LOST, "the node is gone")


@asynccontextmanager
async def pool_of(*fates: Fate) -> AsyncIterator[tuple[Pool, FakeBackend]]:
    """Open a pool whose sandboxes have these fates, in order; the last one is that of all later sandboxes."""
    backend = FakeBackend(lambda number, rng: fates[min(number, len(fates) - 1)])
    async with backend, Pool([Node("here", backend, Capacity(memory_mib=4096))]) as pool:
        yield pool, backend
