"""The nodes for sandboxes that a run starts on its machines (``placement.nodes``)."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from envkit.config.parts import BuiltInSandboxSection
from envkit.errors import UsageError
from envkit.http.client.env_client import TOKEN_VARIABLE
from envkit.protocols import Launcher
from envkit.sandbox.pool import Pool
from envkit.wiring.gateway.remote_nodes import NodeAddress, RemoteNodes
from envkit.wiring.launch.nodes import running_nodes

_START_S = 60.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RunNodes:
    """Nodes that run, whose sandboxes any pool of the run may use.

    Attributes:
        urls: Their addresses, by name.
        token: The token that all of them expect.
        in_image: Whether their sandboxes run in an image.
        lost_s: Seconds without an answer after which a node is lost.
    """

    urls: Mapping[str, str]
    token: str
    in_image: bool
    lost_s: float

    @asynccontextmanager
    async def used_by(self, pool: Pool) -> AsyncIterator[None]:
        """Keep the nodes in `pool` while they answer. The block begins when each has answered, or after a minute.

        Raises:
            UsageError: None has answered.
        """
        known = [NodeAddress(name, url, self.token) for name, url in self.urls.items()]
        async with RemoteNodes(known, file=None, in_image=self.in_image, isolates=None, lost_s=self.lost_s) as nodes:
            with anyio.move_on_after(_START_S):
                while len(nodes.nodes) < len(self.urls):  # noqa: ASYNC110 - a node may also be lost again
                    await anyio.sleep(_POLL_S)
            if not nodes.nodes:
                why = "; ".join(f"{one.node}: {one.why}" for one in nodes.states())
                raise UsageError(f"placement.nodes: no node for sandboxes answered within {_START_S:g} s: {why}")
            nodes.attach(pool)
            yield


@asynccontextmanager
async def run_nodes(
    launcher: Launcher, names: Sequence[str], section: BuiltInSandboxSection, announce: Callable[[str], None]
) -> AsyncIterator[RunNodes]:
    """Start the nodes of a run, and end them with the block.

    Args:
        launcher: Starts them.
        names: Names of nodes of the launcher.
        section: Kind of the sandboxes, and the restart budget of each node.
        announce: Receives lines for the user.

    Raises:
        UsageError: A node cannot be started.
    """
    token = secrets.token_urlsafe(32)
    chosen = () if section.kind == "auto" else ("--backend", section.kind)
    async with running_nodes(
        launcher,
        names,
        chosen,
        env={TOKEN_VARIABLE: token},
        budget=section.restarts.limit(),
        announce=announce,
    ) as urls:
        announce(f"sandbox: on the nodes {', '.join(names)}")
        yield RunNodes(urls, token, section.kind == "docker", section.liveness.lost_s)
