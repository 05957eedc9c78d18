"""The client of a server that lends sandboxes: each call as if the sandbox were here.

Everything goes over one socket, but what is too large for a frame, which goes over HTTP. If the socket breaks, it is
made again and what had no answer is asked again: each call that changes something carries a key, so that it is done
once. A call that is cancelled here is ended there before that is known here.
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

_FULL_DELAYS_S = (0.02, 1.0)
_LEASE_S = 60.0
"""Seconds after which the server stops a leased sandbox of ours once our socket is gone."""


class SandboxClient:
    """Borrows sandboxes from a server. Enter it to connect.

    Args:
        url: Where the server is: ``"http://host:port"``, ``"https://host"`` or ``"unix:/path/of/socket"``.
        token: What to show the server; the variable ``ENVKIT_TOKEN``, unless given.
        ca: PEM file of the certificates that an ``https://`` server is trusted by, instead of the system's.
        trees: Packs and unpacks folders (`envkit.sandbox.transfer.tar_stream`); None: they cannot be copied.
    """

    def __init__(
        self, url: str, token: str | None = None, *, ca: Path | str | None = None, trees: FolderTransport | None = None
    ) -> None:
        self._line = SandboxTransport(url, token or os.environ.get(TOKEN_VARIABLE) or None, ca, trees)
        self._rng = random.Random()
        self._tasks: TaskGroup  # made on entering, since only then there is a loop
        self._carrying: anyio.CancelScope

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec, *, tenant: str = "", wait_s: float = 60.0) -> AsyncIterator[RemoteSandbox]:
        """Lend a sandbox for the length of the block; see `envkit.protocols.SandboxPool.lease`.

        If we die, the server stops it within a minute.

        Raises:
            UsageError: `tenant` is given, which the token says.
        """
        if tenant:
            raise UsageError("a remote sandbox belongs to the tenant of the token; leave tenant out")
        sandbox = await self.start(spec, wait_s=wait_s)
        try:
            yield sandbox
        finally:
            with suppress(EnvkitError):  # where the server is gone, it ends by itself
                await sandbox.stop()

    async def start(self, spec: SandboxSpec, *, snapshot: str | None = None, wait_s: float = 0.0) -> RemoteSandbox:
        """Lend a sandbox that the server stops within a minute after it has lost us; whoever has it stops it.

        Raises:
            EnvkitError: As `create`; `CapacityError` after asking again for `wait_s` seconds.
        """
        id = f"lease-{uuid.uuid4().hex}"
        try:
            await self._create_with_patience(id, spec, snapshot, wait_s)
        except BaseException:
            with suppress(EnvkitError):
                await self.stop(id)
            raise
        return self.get(id)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> RemoteSandbox:
        """Lend a sandbox as `start` does, with the files of `snapshot`."""
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
        """Lend a sandbox under a name, see `envkit.protocols.SandboxPool.create`.

        Args:
            id: Its name: 1 to 128 letters, digits, dots, dashes, underscores, tildes.
            spec: What it is to be.
            ttl_s: Seconds after which it is stopped if nobody uses it and no client that used it is connected; None for
                never.
            snapshot: Name of the files that it begins with.
            wait_s: Seconds to wait for room, in turn with all who do; at most 60.
        """
        if spec.detached:
            raise UsageError("a remote sandbox stays as long as its lease; leave stay out")
        values = {name: getattr(spec, name) for name in wire.SpecBody.__struct_fields__}
        body = wire.CreateFrame(
            **{**values, "env": dict(spec.env)},
            lease_s=ttl_s,
            snapshot=snapshot,
            wait_s=wait_s,
            sandbox_id=wire.read_sandbox_id(id),
        )
        within_s = wait_s + spec.start_timeout_s + SLACK_S
        return (await self._line.call("create", body, wire.SandboxReply, within_s)).view()

    def get(self, id: str) -> RemoteSandbox:
        """Return the sandbox of this name; whether there is one is known when it is used."""
        return RemoteSandbox(wire.read_any_sandbox_id(id), self._line)

    async def view(self, id: str) -> SandboxView:
        """Look at a sandbox without using it.

        Raises:
            SandboxNotFoundError: There is none.
        """
        return (
            await self._line.call("view", wire.SandboxFrame(wire.read_any_sandbox_id(id)), wire.SandboxReply)
        ).view()

    async def views(self) -> list[SandboxView]:
        """Look at all sandboxes that we may see, oldest first."""
        return [one.view() for one in (await self._line.call("list", NoBody(), wire.SandboxesReply)).sandboxes]

    async def snapshots(self) -> list[wire.KeptReply]:
        """Look at all snapshots that we may see, oldest first."""
        return (await self._line.call("snapshots", NoBody(), wire.SnapshotsReply)).snapshots

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot; safe to repeat."""
        await self._line.call("remove_snapshot", wire.KeptFrame(snapshot), DoneReply)

    async def stop(self, id: str) -> None:
        """End a sandbox and wait until nothing is left of it; safe to repeat, not cancelled, bounded (75 s)."""
        await self._line.stop(wire.read_any_sandbox_id(id))

    async def __aenter__(self) -> Self:
        opened = await self._line.channel.open()
        # Whoever is cancelled still ends what it has begun, which needs the socket.
        self._carrying = anyio.CancelScope(shield=True)
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._carry, opened)
        try:
            health = await self._line.channel.call("health", NoBody(), CALL_S)
            self._line.decoded("health", health, HealthReply)
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def _carry(self, socket: ClientConnection) -> None:
        with self._carrying:
            await self._line.channel.run(socket)

    async def _leave(self) -> None:
        self._carrying.cancel()
        self._tasks.cancel_scope.cancel()
        # Not told of the block's own error, which it would wrap in a group.
        await self._tasks.__aexit__(None, None, None)

    async def _create_with_patience(self, id: str, spec: SandboxSpec, snapshot: str | None, wait_s: float) -> None:
        """Make a sandbox as soon as there is room, asking again for `wait_s` seconds."""
        until = clock.now() + wait_s
        delay_s, most_s = _FULL_DELAYS_S
        while True:
            try:
                left_s = min(max(until - clock.now(), 0.0), wire.MAX_WAIT_S)
                await self.create(id, spec, ttl_s=_LEASE_S, snapshot=snapshot, wait_s=left_s)
            except CapacityError:
                if clock.now() + delay_s > until:
                    raise
                await anyio.sleep(delay_s * self._rng.uniform(0.5, 1.0))  # not all clients in step
                delay_s = min(2 * delay_s, most_s)
            else:
                return
