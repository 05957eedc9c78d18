"""Coming back, after a restart, to the sandboxes that another process left running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import anyio

from envkit.errors import EnvkitError
from envkit.protocols import Sandbox
from envkit.sandbox.pool.history import is_over
from envkit.sandbox.pool.nodes import Node
from envkit.types import SandboxState, SandboxView

GONE = "gone while the server was down"
_ATTACH_S = 15.0


@runtime_checkable
class Attaches(Protocol):
    """A backend whose sandboxes can be come back to."""

    async def attach(self, box_id: str) -> Sandbox:
        """Return one that runs.

        Raises:
            EnvkitError: There is none of this id, or it does not let us in.
        """
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
                found[view.id] = await node.backend.attach(view.box_id)
            except (EnvkitError, OSError):
                return

    async with anyio.create_task_group() as tasks:
        # A spare that was being lent may have been written down under both its names; the newer one comes first.
        for view in sorted(views, key=was_lent, reverse=True):
            place = (view.node, view.box_id)
            if view.box_id and not is_over(view.state) and place not in taken:
                taken.add(place)
                tasks.start_soon(attach, view)
    return found
