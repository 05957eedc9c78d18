"""A node that is another machine: the backend of its sandboxes in the gateway's pool, over envkit's own protocol.

`envkit serve --node` serves the sandboxes there. The backend is here and not in `envkit.sandbox`, which must not import
`envkit.http`.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Self

import anyio
import msgspec
from websockets.asyncio.client import ClientConnection

from envkit import clock
from envkit.errors import (
    DeadlineError,
    EnvkitError,
    SandboxError,
    SandboxLostError,
    SandboxNotFoundError,
    UnreachableError,
)
from envkit.http.client.outages import Outages
from envkit.http.client.remote_sandbox import RemoteProgram, RemoteSandbox
from envkit.http.client.sandbox_client import SandboxClient
from envkit.http.protocol import operations as table
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.node_messages import NodeReply
from envkit.http.sandboxes.transfers import FolderTransport
from envkit.protocols import SandboxBackend
from envkit.types import Cause, CauseKind, SandboxSpec, SandboxState
from envkit.types.sandboxes import Blocked

_log = logging.getLogger(__name__)

_LEASE_S = 60.0
"""Seconds after the gateway has disconnected until a sandbox ends that no ledger records."""
_STOP_S = 15.0
_VERDICT_S = 2.0
_FIRST_S = 10.0
_SLACK_S = 5.0
_OVER = (SandboxState.LOST, SandboxState.STOPPED)


class RemoteNode(SandboxBackend):
    """Starts sandboxes on a node; implements `envkit.protocols.SandboxBackend`. Use it with ``async with``.

    The block connects to the node. Its end disconnects, and leaves the sandboxes to the pool, or to their
    time-to-live. Calls wait while the connection is broken, until the node is back or `wait` has declared it lost.

    Args:
        name: Name of the node.
        token: Token for the node; None for a node that needs none. ``ENVKIT_TOKEN`` is never sent to a node.
        lost_s: Seconds without an answer after which the node is lost.

    Attributes:
        facts: What the node reported last.
        lost: Set when the node is lost; `cause` then says why.

    Raises:
        EnvkitError: On entering: the node does not answer, rejects the token, or is not a node.
    """

    # The node's pool already turns starts with too little memory into `SandboxEndedError`.
    distinguishes_memory_limit = True

    def __init__(
        self,
        name: str,
        url: str,
        token: str | None = None,
        *,
        folder_transport: FolderTransport | None = None,
        lost_s: float = 4.0,
    ) -> None:
        self.name = name
        self.facts: NodeReply
        self.lost = anyio.Event()
        self.cause: Cause | None = None
        self._lost_s = lost_s
        self._interval_s = lost_s / 4
        outages = Outages(lost_s + _SLACK_S, _log.warning)
        self._client = SandboxClient(
            url, token, reads_variable=False, folder_transport=folder_transport, outages=outages
        )
        self.transport = self._client.transport
        # The WebSocket has then tried to reconnect twice, which is the confirmation.
        self.transport.websocket.on_outage = lambda error: self.lose(str(error))
        self._run = uuid.uuid4().hex[:16]
        self._answered_at = 0.0

    @property
    def in_image(self) -> bool:
        return self.facts.backend == "docker"

    @property
    def facts_now(self) -> NodeReply:
        """What the node reported last, with the time that its clock shows now."""
        return msgspec.structs.replace(self.facts, at_s=self.facts.at_s + clock.now() - self._answered_at)

    @property
    def is_silent(self) -> bool:
        """Whether an answer of the node is late, so that nothing is known about its sandboxes."""
        return clock.now() - self._answered_at > 1.4 * self._interval_s

    def capabilities(self) -> Mapping[str, bool]:
        return self.facts.capabilities

    def lacks(self, spec: SandboxSpec) -> int:
        """Return how many things that a sandbox needs are not on the node: its image, and folders to mount."""
        facts = self.facts
        lacks_image = self.in_image and spec.image is not None and spec.image not in facts.images
        return lacks_image + sum(source not in facts.data for source, _ in spec.views)

    async def start(self, spec: SandboxSpec) -> NodeSandbox:
        return await self._create(spec, None)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> NodeSandbox:
        return await self._create(spec, snapshot)

    async def snapshot_bytes(self, snapshot: str) -> int:
        return sum(one.bytes for one in await self._client.snapshots() if one.snapshot == snapshot)

    async def remove_snapshot(self, snapshot: str) -> None:
        await self._client.remove_snapshot(snapshot)

    async def attach(self, sandbox_id: str) -> NodeSandbox:
        """Return a running sandbox that this or an earlier gateway started; see `envkit.sandbox.pool.reattach`."""
        view = await self._client.view(sandbox_id)
        if view.state in _OVER:
            raise SandboxError(f"sandbox {sandbox_id!r} has ended: {view.phases[-1].reason}")
        sandbox = NodeSandbox(sandbox_id, self)
        await sandbox.probe(self._lost_s)  # from now on, the connection to the node renews its lease
        return sandbox

    async def list_detached(self, ledger: str) -> Sequence[str]:
        """Return the ids of the running sandboxes that were started for the ledger with the id `ledger`."""
        views = await self._client.views()
        return [view.id for view in views if view.id.startswith(f"{ledger}.") and view.state not in _OVER]

    async def remove(self, sandbox_id: str) -> None:
        """Stop a running sandbox. Unlike `attach`, it accepts an id that the node does not know."""
        await self._client.stop(sandbox_id)

    async def wait(self) -> Cause:
        """Wait until the node is lost, and return the cause.

        It is lost when it refuses connections, has not answered for `lost_s` seconds, or was restarted.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._ping)
            await self.lost.wait()
            tasks.cancel_scope.cancel()
        assert self.cause is not None
        return self.cause

    async def _ping(self) -> None:
        is_late = False
        while True:
            if not is_late:
                await anyio.sleep(self._interval_s)
            began, timeout_s = clock.now(), self._interval_s * (1 if is_late else 2)
            try:
                facts = await self._client.node(timeout_s)
            except DeadlineError as error:
                is_own_lag = clock.now() - began > timeout_s + self._interval_s
                if is_late and not is_own_lag:
                    return self.lose(str(error))
                is_late = True
            except EnvkitError as error:
                return self.lose(str(error))
            else:
                if facts.run != self.facts.run:
                    return self.lose("it was restarted")
                is_late = False
                self._answered(facts)

    def lose(self, why: str) -> None:
        """Declare the node lost."""
        self.cause = self.cause or Cause(CauseKind.NODE_LOST, f"node {self.name} is lost: {why}")
        self.lost.set()

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        try:
            self._answered(await self._client.node(_FIRST_S))
        except BaseException as error:
            await self._client.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self._client.__aexit__(None, None, None)

    def _answered(self, facts: NodeReply) -> None:
        self.facts, self._answered_at = facts, clock.now()

    async def _create(self, spec: SandboxSpec, snapshot: str | None) -> NodeSandbox:
        # The prefix says to which gateway, and which ledger, the sandbox belongs.
        id = f"{spec.ledger or self._run}.{uuid.uuid4().hex[:16]}"
        ttl_s = spec.orphan_ttl_s if spec.detached else _LEASE_S
        plain = replace(spec, detached=False, orphan_ttl_s=None, ledger="")
        try:
            await self._client.create(id, plain, ttl_s=ttl_s, snapshot=snapshot)
        except BaseException:
            with anyio.move_on_after(_STOP_S, shield=True), suppress(EnvkitError):
                await self._client.stop(id)
            raise
        return NodeSandbox(id, self)


class NodeSandbox(RemoteSandbox):
    """A sandbox on a node. If the node is lost, the pool declares all its sandboxes lost; see `RemoteNode.wait`."""

    def __init__(self, id: str, node: RemoteNode) -> None:
        super().__init__(id, node.transport)
        self._node = node

    @property
    def is_excused(self) -> bool:
        """Whether nothing is known about the sandbox, because its node does not answer; then only the node is lost."""
        return self._node.is_silent

    async def wait(self) -> Cause:
        while True:
            try:
                return await super().wait()
            except DeadlineError:
                continue
            except UnreachableError as error:
                return self._node.cause or Cause(CauseKind.NODE_LOST, f"node {self._node.name} is lost: {error}")

    async def connect(self, address: str | int) -> socket.socket:
        """Connect to a socket or a port in the sandbox; with TLS, through a WebSocket."""
        if self._transport.address.startswith("https:"):
            return await super().connect(address)
        with self._unknown_is_lost():
            return await self._transport.open_bytes(table.CONNECT, wire.ConnectQuery(self.id, str(address)))

    async def diagnose(self) -> Blocked:
        """Return why the sandbox does not answer, although its node does."""
        return (await self._transport.websocket.call(table.DIAGNOSE, wire.SandboxFrame(self.id), _STOP_S)).blocked

    async def stop(self) -> None:
        """Stop the sandbox, within 15 s. On a lost node, do nothing: its sandboxes end by themselves."""
        with anyio.CancelScope(shield=True):
            if not self._node.lost.is_set():
                await self._transport.websocket.call(table.STOP, wire.SandboxFrame(self.id), _STOP_S)

    def _program(self, connection: ClientConnection) -> RemoteProgram:
        return _NodeProgram(connection, self.id, self._node)

    @contextmanager
    def _unknown_is_lost(self) -> Iterator[None]:
        try:
            yield
        except SandboxNotFoundError:
            cause = Cause(CauseKind.NODE_LOST, f"node {self._node.name} was restarted, and no longer has the sandbox")
            raise SandboxLostError(self.id, cause) from None


class _NodeProgram(RemoteProgram):
    """A program on a node. If its connection breaks because the node is lost, the sandbox is."""

    def __init__(self, connection: ClientConnection, sandbox_id: str, node: RemoteNode) -> None:
        super().__init__(connection, node.name)
        self._sandbox_id = sandbox_id
        self._node = node

    async def receive(self) -> tuple[str, bytes] | None:
        try:
            return await super().receive()
        except UnreachableError:
            with anyio.move_on_after(_VERDICT_S):
                await self._node.lost.wait()
            if self._node.cause is None:
                raise
            raise SandboxLostError(self._sandbox_id, self._node.cause) from None
