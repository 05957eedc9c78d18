"""The sandboxes of a server, for ``envkit sandbox --url``."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from envkit.http.client.connect import read_token
from envkit.http.client.sandbox_client import SandboxClient
from envkit.http.protocol.sandbox_messages import KeptReply
from envkit.http.sandboxes.access import MAX_TIMEOUT_S
from envkit.sandbox.transfer import tar_stream
from envkit.types import SandboxSpec, SandboxView
from envkit.wiring.sandboxes.blocking import AnySandbox
from envkit.wiring.sandboxes.service import SandboxService


@dataclass(frozen=True, slots=True)
class RemoteService(SandboxService):
    """The sandboxes of a server. The server stops a detached sandbox after its time to live, or an hour without use.

    Attributes:
        url: Address of the server.
        token_file: File that contains a token; None uses the environment variable ``ENVKIT_TOKEN``, if it is set.
        ca: PEM file with the CA certificates to trust; None trusts the system's CA certificates.
    """

    max_timeout_s: ClassVar[float] = MAX_TIMEOUT_S

    url: str
    token_file: Path | None = None
    ca: Path | None = None

    @asynccontextmanager
    async def running(self, spec: SandboxSpec) -> AsyncIterator[AnySandbox]:
        async with self._client() as client, client.lease(spec) as sandbox:
            yield sandbox

    @asynccontextmanager
    async def start_detached(self, spec: SandboxSpec) -> AsyncIterator[AnySandbox]:
        name = f"sandbox-{uuid.uuid4().hex[:12]}"
        async with self._client() as client:
            try:
                await client.create(name, replace(spec, detached=False))
                yield client.get(name)
            except BaseException:
                await client.stop(name)
                raise

    @asynccontextmanager
    async def attached(self, id: str) -> AsyncIterator[AnySandbox]:
        async with self._client() as client:
            await client.view(id)  # raises if there is no such id, but not if the sandbox has ended
            yield client.get(id)

    async def stop(self, id: str) -> None:
        async with self._client() as client:
            await client.view(id)
            await client.stop(id)

    async def views(self) -> list[SandboxView]:
        """Return the sandboxes that the token may see, oldest first."""
        async with self._client() as client:
            return await client.views()

    async def snapshots(self) -> list[KeptReply]:
        """Return the snapshots that the token may see, oldest first."""
        async with self._client() as client:
            return await client.snapshots()

    async def remove_snapshots(self, names: Sequence[str]) -> None:
        """Remove the snapshots `names`. A snapshot that does not exist is not an error."""
        async with self._client() as client:
            for name in names:
                await client.remove_snapshot(name)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[SandboxClient]:
        async with SandboxClient(self.url, self._token(), ca=self.ca, folder_transport=tar_stream) as client:
            yield client

    def _token(self) -> str | None:
        if self.token_file is None:
            return None
        return read_token(self.token_file, partial(print, file=sys.stderr))
