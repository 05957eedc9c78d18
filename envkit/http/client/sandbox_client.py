"""The client of a sandbox server: remote sandboxes are used like local ones.

Calls share one WebSocket; large transfers use HTTP. If the socket breaks, the client reconnects and sends unanswered
calls again; calls that change something have an idempotency key, so that they run once. Cancelling a call waits until
the server has cancelled it too.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup
from websockets.asyncio.client import ClientConnection

from envkit import clock
from envkit.errors import (
    CapacityError,
    EnvkitError,
    UsageError,
)
from envkit.http.client.env_client import TOKEN_VARIABLE
from envkit.http.client.remote_sandbox import CALL_S, SLACK_S, RemoteSandbox, SandboxTransport
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.messages import DoneReply, HealthReply, NoBody
from envkit.http.sandboxes.transfers import FolderTransport
from envkit.types import SandboxSpec, SandboxView

_RETRY_DELAYS_S = (0.02, 1.0)
_LEASE_S = 60.0
"""Seconds after which the server stops a leased sandbox of a disconnected client."""


class SandboxClient:
    """Leases sandboxes from a server. Enter it to connect.

    Args:
        url: Address of the server: ``"http://host:port"``, ``"https://host"`` or ``"unix:/path/of/socket"``.
        token: Token for the server; default: the variable ``ENVKIT_TOKEN``.
        ca: PEM file of the certificates to trust for ``https://``, instead of the system's.
        folder_transport: Packs and unpacks folders (`envkit.sandbox.transfer.tar_stream`); None: no folder transfers.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        ca: Path | str | None = None,
        folder_transport: FolderTransport | None = None,
    ) -> None:
        self._transport = SandboxTransport(url, token or os.environ.get(TOKEN_VARIABLE) or None, ca, folder_transport)
        self._rng = random.Random()
        self._tasks: TaskGroup  # created in __aenter__, because it needs a running event loop
        self._connection_scope: anyio.CancelScope

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec, *, tenant: str = "", wait_s: float = 60.0) -> AsyncIterator[RemoteSandbox]:
        """Lease a sandbox for the duration of the block; see `envkit.protocols.SandboxPool.lease`.

        If this client dies, the server stops the sandbox within a minute.

        Raises:
            UsageError: `tenant` is set; the token determines it.
        """
        if tenant:
            raise UsageError("a remote sandbox belongs to the tenant of the token; leave tenant out")
        sandbox = await self.start(spec, wait_s=wait_s)
        try:
            yield sandbox
        finally:
            with suppress(EnvkitError):  # if the server is unreachable, the lease expires
                await sandbox.stop()

    async def start(self, spec: SandboxSpec, *, snapshot: str | None = None, wait_s: float = 0.0) -> RemoteSandbox:
        """Lease a sandbox until the caller stops it; it ends within a minute after this client disconnects.

        Raises:
            EnvkitError: As `create`; `CapacityError` after retrying for `wait_s` seconds.
        """
        id = f"lease-{uuid.uuid4().hex}"
        try:
            await self._create_with_retries(id, spec, snapshot, wait_s)
        except BaseException:
            with suppress(EnvkitError):
                await self.stop(id)
            raise
        return self.get(id)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> RemoteSandbox:
        """Lease a sandbox as `start` does, with the files of `snapshot`."""
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
        """Lease a sandbox under an id, see `envkit.protocols.SandboxPool.create`.

        Args:
            id: 1 to 128 letters, digits, dots, dashes, underscores, tildes.
            spec: Its spec.
            ttl_s: Seconds without use after which the sandbox is stopped, unless a client that has used it is still
                connected; None for never.
            snapshot: Name of the snapshot to start from.
            wait_s: Seconds to wait in the queue for capacity; at most 60.
        """
        if spec.detached:
            raise UsageError("a remote sandbox lives as long as its lease; leave detached out")
        values = {name: getattr(spec, name) for name in wire.SpecBody.__struct_fields__}
        body = wire.CreateFrame(
            **{**values, "env": dict(spec.env)},
            lease_s=ttl_s,
            snapshot=snapshot,
            wait_s=wait_s,
            sandbox_id=wire.read_sandbox_id(id),
        )
        within_s = wait_s + spec.start_timeout_s + SLACK_S
        return (await self._transport.call("create", body, wire.SandboxReply, within_s)).view()

    def get(self, id: str) -> RemoteSandbox:
        """Return the sandbox with this id. Does not check that it exists."""
        return RemoteSandbox(wire.read_any_sandbox_id(id), self._transport)

    async def view(self, id: str) -> SandboxView:
        """Return the state of a sandbox without using it.

        Raises:
            SandboxNotFoundError: No sandbox has this id.
        """
        return (
            await self._transport.call("view", wire.SandboxFrame(wire.read_any_sandbox_id(id)), wire.SandboxReply)
        ).view()

    async def views(self) -> list[SandboxView]:
        """List all sandboxes visible to this client, oldest first."""
        return [one.view() for one in (await self._transport.call("list", NoBody(), wire.SandboxesReply)).sandboxes]

    async def snapshots(self) -> list[wire.KeptReply]:
        """List all snapshots visible to this client, oldest first."""
        return (await self._transport.call("snapshots", NoBody(), wire.SnapshotsReply)).snapshots

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot; safe to repeat."""
        await self._transport.call("remove_snapshot", wire.KeptFrame(snapshot), DoneReply)

    async def stop(self, id: str) -> None:
        """Stop a sandbox and wait until it is removed, for at most 75 s. Safe to repeat; continues when cancelled."""
        await self._transport.stop(wire.read_any_sandbox_id(id))

    async def __aenter__(self) -> Self:
        opened = await self._transport.websocket.open()
        # A cancelled task still stops its sandbox, which needs the socket.
        self._connection_scope = anyio.CancelScope(shield=True)
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._run_connection, opened)
        self._transport.tasks = self._tasks
        try:
            health = await self._transport.websocket.call("health", NoBody(), CALL_S)
            self._transport.decode("health", health, HealthReply)
        except BaseException:
            await self._disconnect()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._disconnect()

    async def _run_connection(self, socket: ClientConnection) -> None:
        with self._connection_scope:
            await self._transport.websocket.run(socket)

    async def _disconnect(self) -> None:
        self._connection_scope.cancel()
        self._tasks.cancel_scope.cancel()
        # Do not pass the error of the block: the task group would wrap it in an exception group.
        await self._tasks.__aexit__(None, None, None)

    async def _create_with_retries(self, id: str, spec: SandboxSpec, snapshot: str | None, wait_s: float) -> None:
        """Create a sandbox as soon as there is capacity, retrying for `wait_s` seconds."""
        until = clock.now() + wait_s
        delay_s, max_s = _RETRY_DELAYS_S
        while True:
            try:
                left_s = min(max(until - clock.now(), 0.0), wire.MAX_WAIT_S)
                await self.create(id, spec, ttl_s=_LEASE_S, snapshot=snapshot, wait_s=left_s)
            except CapacityError:
                if clock.now() + delay_s > until:
                    raise
                await anyio.sleep(delay_s * self._rng.uniform(0.5, 1.0))  # jitter
                delay_s = min(2 * delay_s, max_s)
            else:
                return
