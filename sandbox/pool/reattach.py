"""Coming back, after a restart, to the sandboxes that another process left running."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import anyio

from envkit.errors import EnvkitError
from envkit.protocols import Sandbox
from envkit.types import Cause, CauseKind, SandboxState, SandboxView

from .instance import is_over
from .node import Node

_log = logging.getLogger(__name__)

GONE = Cause(CauseKind.UNKNOWN, "gone while the server was down")
_ATTACH_S = 15.0
_LOOK_S = 15.0
_END_S = 15.0


@runtime_checkable
class Attaches(Protocol):
    """A backend whose sandboxes can be come back to."""

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return one that runs.

        Raises:
            EnvkitError: There is none of this id, or it does not let us in.
        """
        ...

    async def staying(self, ledger: str) -> Sequence[str]:
        """Return the ids of those that were started for one ledger and still run."""
        ...

    async def remove(self, sandbox_id: str) -> None:
        """End one that runs; raises as `attach`."""
        ...


def was_lent(view: SandboxView) -> bool:
    """Say whether somebody had it, as opposed to a spare."""
    return any(phase.state is SandboxState.LEASED for phase in view.phases)


async def attached(views: Sequence[SandboxView], nodes: Mapping[str, Node]) -> dict[str, Sandbox]:
    """Come back to all that were up, at once and each within 15 s.

    Returns:
        What was found, by the pool's id.
    """
    found: dict[str, Sandbox] = {}
    taken: set[tuple[str, str]] = set()

    async def attach(view: SandboxView) -> None:
        node = nodes.get(view.node)
        if node is None or not isinstance(node.backend, Attaches):
            return
        with anyio.move_on_after(_ATTACH_S):
            try:
                found[view.id] = await node.backend.attach(view.backend_id)
            except (EnvkitError, OSError):
                return

    async with anyio.create_task_group() as tasks:
        # A spare that was being lent may have been written down under both its names; the newer one comes first.
        for view in sorted(views, key=was_lent, reverse=True):
            place = (view.node, view.backend_id)
            if view.backend_id and not is_over(view.state) and place not in taken:
                taken.add(place)
                tasks.start_soon(attach, view)
    return found


async def end_others(ledger: str, nodes: Mapping[str, Node], known: Callable[[], Awaitable[Collection[str]]]) -> None:
    """End what was started for a ledger and nobody knows, such as what had no id yet when its server was killed, and
    what was on a node that was lost.

    What does not end within 15 s ends itself when it has been lonely for long enough.

    Args:
        ledger: Its id.
        nodes: Where to look.
        known: Returns the ids of what is not to be ended, wherever that is, since two nodes may be one machine. It is
            asked once it is known what there is, for each node anew, and may wait for the ids of what is being started.
    """

    async def end(node: Node, backend: Attaches, sandbox_id: str) -> None:
        try:
            await backend.remove(sandbox_id)
        except Exception as error:  # a node of which this is not true must not end the pool
            _log.warning("sandbox %s of an earlier time may be left behind on %s: %s", sandbox_id, node.name, error)

    async def end_on(node: Node, backend: Attaches) -> None:
        try:
            with anyio.fail_after(_LOOK_S):
                staying = await backend.staying(ledger)
        except Exception as error:
            why = str(error) or f"no answer within {_LOOK_S:g} s"
            _log.warning("sandboxes of an earlier time may be left behind on %s: %s", node.name, why)
            return
        kept = await known() if staying else ()
        with anyio.move_on_after(_END_S):
            async with anyio.create_task_group() as ending:
                for sandbox_id in staying:
                    if sandbox_id not in kept:
                        ending.start_soon(end, node, backend, sandbox_id)

    async with anyio.create_task_group() as tasks:
        for node in nodes.values():
            if isinstance(node.backend, Attaches):
                tasks.start_soon(end_on, node, node.backend)
