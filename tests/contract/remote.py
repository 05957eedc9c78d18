"""Bubblewrap sandboxes behind a server on a real socket, as a backend."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Self

from envkit.http.client.remote_sandbox import RemoteSandbox
from envkit.http.client.sandbox_client import SandboxClient
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.host.layout import WORK
from envkit.sandbox.transfer import tar_stream
from envkit.types import SandboxSpec
from tests.http.envs import serving, slots
from tests.http.pools import pool_of


class NamedRemoteSandbox:
    """A remote sandbox with the paths of a sandbox, named by the name that it was requested with."""

    def __init__(self, sandbox: RemoteSandbox) -> None:
        self.work = WORK
        self.grader_home = sandbox.grader_home
        self.id = sandbox.id
        self.exec = sandbox.exec
        self.program = sandbox.program
        self.shell = sandbox.shell
        self.read = sandbox.read
        self.write = sandbox.write
        self.upload = sandbox.upload
        self.download = sandbox.download
        self.connect = sandbox.connect
        self.probe = sandbox.probe
        self.snapshot = sandbox.snapshot
        self.log = sandbox.log
        self.stats = sandbox.stats
        self.wait = sandbox.wait
        self.stop = sandbox.stop


class RemoteBackend:
    def __init__(self) -> None:
        self._backend = LocalBackend()
        self._open = AsyncExitStack()
        self._client: SandboxClient
        self._started = 0

    def capabilities(self) -> Mapping[str, bool]:
        return self._backend.capabilities()

    async def start(self, spec: SandboxSpec) -> NamedRemoteSandbox:
        return await self._create(spec, None)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> NamedRemoteSandbox:
        return await self._create(spec, snapshot)

    async def snapshot_bytes(self, snapshot: str) -> int:
        return sum(one.bytes for one in await self._client.snapshots() if one.snapshot == snapshot)

    async def remove_snapshot(self, snapshot: str) -> None:
        await self._client.remove_snapshot(snapshot)

    async def __aenter__(self) -> Self:
        backend = await self._open.enter_async_context(self._backend)
        pool = await self._open.enter_async_context(pool_of(backend))
        host = await self._open.enter_async_context(slots())
        address = await self._open.enter_async_context(serving(host, pool=pool, folder_transport=tar_stream))
        self._client = await self._open.enter_async_context(SandboxClient(address, folder_transport=tar_stream))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def _create(self, spec: SandboxSpec, snapshot: str | None) -> NamedRemoteSandbox:
        self._started += 1
        view = await self._client.create(f"sandbox-{self._started}", spec, snapshot=snapshot)
        return NamedRemoteSandbox(self._client.get(view.id))
