"""After a restart, re-attach to those sandboxes of the previous process that the ledger records; remove the others."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import anyio

from envkit.errors import EnvkitError
from envkit.protocols import Sandbox
from envkit.types import Cause, CauseKind, SandboxView, TenantKey

from .instance import is_over, was_leased
from .node import Node

_log = logging.getLogger(__name__)

GONE = Cause(CauseKind.UNKNOWN, "gone while the server was down")
_ATTACH_S = 15.0
_LIST_S = 15.0
_END_S = 15.0


@runtime_checkable
class Attaches(Protocol):
    """A backend that can re-attach to running sandboxes."""

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Connect to a running sandbox and return it.

        Raises:
            EnvkitError: There is no such sandbox, or it refuses the connection.
        """
        ...

    async def list_detached(self, ledger: str) -> Sequence[str]:
        """Return the ids of the running sandboxes that were started for the ledger with the id `ledger`."""
        ...

    async def remove(self, sandbox_id: str) -> None:
        """Remove a running sandbox; raises the same errors as `attach`."""
        ...


async def attached(views: Sequence[SandboxView], nodes: Mapping[str, Node]) -> dict[TenantKey, Sandbox]:
    """Connect concurrently to all sandboxes that have not ended according to `views`, with a timeout of 15 s each.

    Returns:
        The sandboxes that answered.
    """
    found: dict[TenantKey, Sandbox] = {}
    taken: set[tuple[str, str]] = set()

    async def attach(view: SandboxView) -> None:
        node = nodes.get(view.node)
        if node is None or not isinstance(node.backend, Attaches):
            return
        with anyio.move_on_after(_ATTACH_S):
            try:
                found[view.key] = await node.backend.attach(view.backend_id)
            except (EnvkitError, OSError):
                return

    async with anyio.create_task_group() as tasks:
        # A warm sandbox gets a new id when it is leased, so `views` may contain one sandbox under both ids. The view of
        # the lease is the right one: such views come first, and another view of the same sandbox is skipped.
        for view in sorted(views, key=was_leased, reverse=True):
            sandbox = (view.node, view.backend_id)
            if view.backend_id and not is_over(view.state) and sandbox not in taken:
                taken.add(sandbox)
                tasks.start_soon(attach, view)
    return found


async def end_others(ledger: str, nodes: Mapping[str, Node], known: Callable[[], Awaitable[Collection[str]]]) -> None:
    """Remove orphans: sandboxes that were started for a ledger, but that `known` does not return.

    For example, they were starting when the server was killed, or their node left the pool. An orphan that cannot be
    removed within 15 s ends itself after its orphan timeout.

    Args:
        ledger: Id of the ledger.
        nodes: Nodes to search.
        known: Called after a node's sandboxes were listed. Returns the backend ids of the sandboxes to keep, also on
            other nodes, because two nodes may be the same machine. It may wait for sandboxes that are starting.
    """

    async def end(node: Node, backend: Attaches, sandbox_id: str) -> None:
        try:
            await backend.remove(sandbox_id)
        except Exception as error:  # an error of one node must not end the pool
            _log.warning("cannot remove sandbox %s of an earlier process on node %s: %s", sandbox_id, node.name, error)

    async def end_on(node: Node, backend: Attaches) -> None:
        try:
            with anyio.fail_after(_LIST_S):
                running = await backend.list_detached(ledger)
        except Exception as error:
            why = str(error) or f"no answer within {_LIST_S:g} s"
            _log.warning("cannot find the sandboxes of earlier processes on node %s: %s", node.name, why)
            return
        kept = await known() if running else ()
        with anyio.move_on_after(_END_S):
            async with anyio.create_task_group() as ending:
                for sandbox_id in running:
                    if sandbox_id not in kept:
                        ending.start_soon(end, node, backend, sandbox_id)

    async with anyio.create_task_group() as tasks:
        for node in nodes.values():
            if isinstance(node.backend, Attaches):
                tasks.start_soon(end_on, node, node.backend)
