"""Opens the sandboxes of this machine for environments that use sandboxes as tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from envkit.sandbox.docker.backend import PLAIN_IMAGE
from envkit.sandbox.machine import this_machine, with_defaults
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import LivenessTimes
from envkit.sandbox.pool.node import Capacity, Node
from envkit.wiring.sandboxes.backends import BackendKind, choose


@asynccontextmanager
async def open_tool_pool(
    kind: str = "auto",
    *,
    times: LivenessTimes | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[Pool]:
    """Open a pool of sandboxes of this machine. `"auto"` isolates: it never chooses plain child processes.

    Args:
        kind: Kind of the backend; see `envkit.wiring.sandboxes.backends.choose`.
        times: When a sandbox that does not answer is suspected and lost.
        announce: Called with one line: the chosen backend and, if it is a fallback, the reason.

    Raises:
        UsageError: This kind does not work on this machine; the message names the remedy.
    """
    chosen = await choose(cast("BackendKind", kind), image=PLAIN_IMAGE)
    announce(f"sandboxes of the environment: {chosen.name}{chosen.reason}")
    async with chosen.backend as backend:
        node = Node("here", backend, with_defaults(Capacity(), this_machine()))
        async with Pool([node], liveness_times=times or LivenessTimes()) as pool:
            yield pool
