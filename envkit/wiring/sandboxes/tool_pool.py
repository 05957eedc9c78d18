"""Opens the sandboxes of this machine for environments that use sandboxes as tools."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import cast

from envkit.sandbox.machine import this_machine, with_defaults
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import LivenessTimes
from envkit.sandbox.pool.node import Capacity, Node
from envkit.wiring.sandboxes.backends import BackendKind, choose_for_policy

_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_tool_pool(
    kind: str = "auto",
    *,
    times: LivenessTimes | None = None,
    announce: Callable[[str], None] | None = None,
    views: Sequence[tuple[str, str]] = (),
) -> AsyncIterator[Pool]:
    """Open a pool of sandboxes of this machine. `"auto"` isolates: it never chooses plain child processes.

    Args:
        kind: Kind of the backend; see `envkit.wiring.sandboxes.backends.choose_for_policy`.
        times: When a sandbox that does not answer is suspected and lost.
        announce: Called with one line: the chosen backend, why it is a fallback, and which limits it lacks. With
            None, the log has one warning per process if it lacks limits.
        views: As in `Pool`.

    Raises:
        UsageError: This kind does not work on this machine; the message names the remedy.
    """
    chosen = await choose_for_policy(cast("BackendKind", kind))
    line = f"sandboxes of the environment: {chosen.name}{chosen.reason}"
    if announce is not None:
        announce(line)
    elif chosen.lacking:
        _warn_once(line)
    async with chosen.backend as backend:
        node = Node("here", backend, with_defaults(Capacity(), this_machine()))
        async with Pool([node], liveness_times=times or LivenessTimes(), views=views) as pool:
            yield pool


@cache
def _warn_once(line: str) -> None:
    """Log a warning, once per process: a vector opens a pool for each of its copies."""
    _log.warning(line)
