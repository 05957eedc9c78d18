"""A pool of one node, for servers that lend sandboxes."""

from __future__ import annotations

from envkit.protocols import SandboxBackend
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node


def pool_of(backend: SandboxBackend) -> Pool:
    """A pool whose only node starts sandboxes of `backend`, which must be open."""
    return Pool([Node("here", backend)])
