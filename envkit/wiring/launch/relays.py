"""The launcher for the nodes of a cluster: processes on other nodes have relays here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from envkit.types import THIS_NODE, Node, Place

from .local import LocalLauncher, LocalProcess, find, start

Relay: TypeAlias = Callable[[Sequence[str], Mapping[str, str], Place, Node], tuple[Sequence[str], Mapping[str, str]]]
"""Returns a program, and variables for it, that runs another one on a node, and stands for it here: output, exit code,
and end. It gets the arguments of `Launcher.start`, and the node."""

_PORTS = range(20_000, 30_000)
"""Ports of servers on other nodes: neither Ray's workers nor the kernel's outgoing connections use them by default."""


class RelayLauncher:
    """Starts processes on this node directly, and on others by relays. It implements `envkit.protocols.Launcher`."""

    def __init__(self, others: Sequence[Node], relay: Relay) -> None:
        self._local = LocalLauncher()
        self._relay = relay
        self.nodes = (*self._local.nodes, *others)

    async def endpoint(self, node: str, port: int | None = None) -> tuple[str, int]:
        """See `envkit.protocols.Launcher.endpoint`. A port on another node is drawn, and not checked."""
        if node == THIS_NODE:
            return await self._local.endpoint(node, port)
        return find(self.nodes, node).address, port or _PORTS[secrets.randbelow(len(_PORTS))]

    async def start(self, argv: Sequence[str], env: Mapping[str, str], *, place: Place, name: str) -> LocalProcess:
        """See `envkit.protocols.Launcher.start`. The GPUs on another node are as many, chosen by the cluster."""
        if place.node == THIS_NODE:
            return await self._local.start(argv, env, place=place, name=name)
        node = find(self.nodes, place.node)
        words, variables = self._relay(argv, env, place, node)
        return start(words, variables, name=name)
