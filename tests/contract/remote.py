"""Bubblewrap sandboxes of a node, behind its application on a real socket, as the gateway's pool uses them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Self

from envkit.fleet.remote_node import NodeSandbox, RemoteNode
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.host.layout import WORK
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.sandbox.transfer import tar_stream
from envkit.types import SandboxSpec
from envkit.wiring.gateway.node_server import LIVENESS, NodeFacts, node_app
from tests.http.envs import listening


class WorkingSandbox(NodeSandbox):
    """A sandbox of a node, with the path of its working folder, which the cases use."""

    work = WORK


class RemoteBackend:
    def __init__(self) -> None:
        self._open = AsyncExitStack()
        self.node: RemoteNode

    def capabilities(self) -> Mapping[str, bool]:
        return self.node.capabilities()

    async def start(self, spec: SandboxSpec) -> WorkingSandbox:
        return WorkingSandbox((await self.node.start(spec)).id, self.node)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> WorkingSandbox:
        return WorkingSandbox((await self.node.restore(snapshot, spec)).id, self.node)

    async def snapshot_bytes(self, snapshot: str) -> int:
        return await self.node.snapshot_bytes(snapshot)

    async def remove_snapshot(self, snapshot: str) -> None:
        await self.node.remove_snapshot(snapshot)

    async def __aenter__(self) -> Self:
        backend = await self._open.enter_async_context(LocalBackend())
        node = Node("here", backend)
        pool = await self._open.enter_async_context(Pool([node], liveness_times=LIVENESS))
        app = node_app(NodeFacts(node, "local"), pool)
        address = await self._open.enter_async_context(listening(app, byte_streams=True))
        self.node = await self._open.enter_async_context(RemoteNode("n1", address, folder_transport=tar_stream))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()
