"""The client of a sandbox server. It makes remote sandboxes usable like local ones.

All calls share one WebSocket; large transfers use HTTP. If the WebSocket breaks, the client reconnects and sends the
unanswered calls again. A call with effects carries an idempotency key, so that the server runs the call only once. If
the task that makes such a call is cancelled, the client cancels the call on the server before the task ends.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from envkit import clock
from envkit.errors import EnvkitError, UsageError
from envkit.http.client.env_client import TOKEN_VARIABLE
from envkit.http.client.outages import Outages
from envkit.http.client.remote_sandbox import SLACK_S, RemoteSandbox
from envkit.http.client.transport import SandboxTransport
from envkit.http.protocol import node_messages as nodes
from envkit.http.protocol import operations as table
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.messages import NoBody
from envkit.http.sandboxes.transfers import FolderTransport
from envkit.types import SandboxSpec, SandboxView

_LEASE_S = 60.0
"""Seconds after a client has disconnected until the server stops the sandboxes that the client leased."""


class SandboxClient:
    """Leases sandboxes from a server. Use the client with ``async with``, which connects to the server.

    Args:
        url: Address of the server: ``"http://host:port"``, ``"https://host"`` or ``"unix:/path/of/socket"``.
        token: Token for the server; default: the environment variable ``ENVKIT_TOKEN``, if `reads_variable`.
        reads_variable: Whether that variable is a token for this server; if not, and without `token`, none is sent.
        ca: PEM file with the certificates to trust for ``https://``, instead of those of the system.
        folder_transport: Packs folders, for example `envkit.sandbox.transfer.tar_stream`; None: folders are not copied.
        outages: Repeats calls during outages of the server, except stops and copies of folders; None: no call waits.

    Attributes:
        transport: The connections to the server.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        reads_variable: bool = True,
        ca: Path | str | None = None,
        folder_transport: FolderTransport | None = None,
        outages: Outages | None = None,
    ) -> None:
        if reads_variable:
            token = token or os.environ.get(TOKEN_VARIABLE) or None
        self.transport = SandboxTransport(url, token, ca, folder_transport, outages or Outages(0.0, print))
        self._resources: AsyncExitStack  # created in `__aenter__`

    @asynccontextmanager
    async def lease(
        self, spec: SandboxSpec, *, tenant: str = "", wait_s: float = 60.0, snapshot: str | None = None
    ) -> AsyncIterator[RemoteSandbox]:
        """Lease a sandbox for the duration of the block; see `envkit.protocols.SandboxPool.lease`.

        If this client's process dies, the server stops the sandbox within a minute.

        Raises:
            UsageError: `tenant` is not empty. The server derives the tenant from the token.
        """
        if tenant:
            raise UsageError("the token determines the tenant of a remote sandbox; omit tenant")
        sandbox = await self.start(spec, snapshot=snapshot, wait_s=wait_s)
        try:
            yield sandbox
        finally:
            # Ignore errors: if the server is unreachable, the lease expires and the server stops the sandbox.
            with suppress(EnvkitError):
                await sandbox.stop()

    async def start(self, spec: SandboxSpec, *, snapshot: str | None = None, wait_s: float = 0.0) -> RemoteSandbox:
        """Lease a sandbox until the caller stops it, or until a minute after this client disconnects.

        Raises:
            EnvkitError: See `create`. A call above the server's capacity or limits is retried for `wait_s` seconds.
        """
        id, until = f"lease-{uuid.uuid4().hex}", clock.now() + wait_s

        async def create() -> None:
            left_s = min(max(until - clock.now(), 0.0), wire.MAX_WAIT_S)
            await self.create(id, spec, ttl_s=_LEASE_S, snapshot=snapshot, wait_s=left_s)

        try:
            await self.transport.with_retries(create, wait_s)
        except BaseException:
            with suppress(EnvkitError):
                await self.stop(id)
            raise
        return self.get(id)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> RemoteSandbox:
        """Lease a sandbox as `start` does. At its start, the sandbox contains the files of `snapshot`."""
        return await self.start(spec, snapshot=snapshot)

    async def create(
        self,
        id: str,
        spec: SandboxSpec,
        *,
        ttl_s: float | None = wire.LEASE_S,
        snapshot: str | None = None,
        wait_s: float = 0.0,
    ) -> SandboxView:
        """Lease a sandbox with an id that the caller chooses; see `envkit.protocols.SandboxPool.create`.

        `id` has 1 to 128 letters, digits, dots, dashes, underscores, tildes. The seconds `ttl_s` without use do not
        pass while a client that has used the sandbox is connected. `wait_s` is at most 60.
        """
        if spec.detached:
            raise UsageError("a remote sandbox always ends with its lease, so it cannot be detached; omit detached")
        body = wire.CreateFrame.of(spec, lease_s=ttl_s, snapshot=snapshot, wait_s=wait_s, sandbox_id=id)
        within_s = wait_s + spec.start_timeout_s + SLACK_S
        return (await self.transport.call(table.CREATE_SANDBOX, body, within_s)).view()

    def get(self, id: str) -> RemoteSandbox:
        """Return the sandbox with this id, without checking that the sandbox exists."""
        return RemoteSandbox(id, self.transport)

    async def view(self, id: str) -> SandboxView:
        """Return the state of a sandbox. The call does not count as use, so it does not renew the lease.

        Raises:
            SandboxNotFoundError: No sandbox has this id.
        """
        return (await self.transport.call(table.VIEW, wire.SandboxFrame(id))).view()

    async def views(self) -> list[SandboxView]:
        """List all sandboxes that this client may see, oldest first."""
        return [one.view() for one in (await self.transport.call(table.VIEWS, NoBody())).sandboxes]

    async def snapshots(self) -> list[wire.KeptReply]:
        """List all snapshots that this client may see, oldest first."""
        return (await self.transport.call(table.LIST_SNAPSHOTS, NoBody())).snapshots

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot. The call is safe to repeat."""
        await self.transport.call(table.REMOVE_SNAPSHOT, wire.KeptFrame(snapshot))

    async def node(self, timeout_s: float) -> nodes.NodeReply:
        """Return what the server, which must be a node, is and has. The call does not wait for an outage to end."""
        return await self.transport.websocket.call(table.NODE_FACTS, NoBody(), timeout_s)

    async def join(self, body: nodes.JoinFrame) -> None:
        """Make a node known to the server, which then uses it. The call is safe to repeat."""
        await self.transport.call(table.JOIN, body)

    async def list_nodes(self) -> list[nodes.NodeStatus]:
        """List the server's nodes that are other machines."""
        return (await self.transport.call(table.NODE_LIST, NoBody())).nodes

    async def drain(self, node: str, *, drains: bool = True) -> nodes.NodeStatus:
        """Give a node no new sandboxes, or use it again. The call is safe to repeat."""
        return await self.transport.call(table.DRAIN, nodes.DrainFrame(drains, node=node))

    async def stop(self, id: str) -> None:
        """Stop a sandbox; see `RemoteSandbox.stop`."""
        await self.get(id).stop()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as resources:
            self.transport.tasks = await resources.enter_async_context(self.transport.websocket.connected())
            await self.transport.call(table.HEALTH, NoBody())
            self._resources = resources.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._resources.__aexit__(kind, error, trace)
