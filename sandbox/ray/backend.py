"""The backend for one node of a Ray cluster.

A Ray actor on the node (`envkit.sandbox.ray.node_agent`) starts and stops the node's sandboxes. Calls to a sandbox do
not use Ray, but a TCP connection from this process to the node. If the connection breaks, the calls fail immediately,
even if Ray has not noticed yet that the node is lost.

The node needs envkit, root rights, and bubblewrap or a Docker daemon. This process must run on a cluster machine.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Self

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxError, SandboxStartError
from envkit.types import Cause, CauseKind, SandboxSpec
from envkit.types.sandboxes import Blocked

from ..agent_client.channel import AgentChannel, SocketStream, Survived
from ..agent_client.resources import HostResources
from ..agent_client.sandbox import AgentSandbox
from ..host.instances import LiveSandboxes, not_ready
from .cluster import Actor, Cluster, ClusterNode, UnreachedError
from .node_agent import Answer, NodeKind, greeting, tune

_OPEN_S = 60.0
"""Timeout for the start of the process in which Ray runs the actor. It takes seconds, or longer on a busy machine."""
_CLOSE_S = 20.0
_CAUSE_S = 2.0
_DIAGNOSE_S = 2.0
_DIAL_TIMEOUT_S = 10.0
_ATTACH_S = 10.0
_STOP_S = 12.0
_SLACK_S = 5.0
"""Seconds added to a sandbox's start timeout for the messages between this process and the node."""
_PING_EVERY_S = 1.0
_SILENT_S = 3.0
"""Seconds without an answer after which a node's actor, and with it the node, counts as lost."""
_RETRY_S = 0.2


class RayNodeBackend:
    """Starts sandboxes on one node of a Ray cluster; implements `envkit.protocols.SandboxBackend`.

    Use it with ``async with``, inside the block of `connection`. The end of the block ends the node's actor and stops
    all sandboxes except detached ones. A detached sandbox runs on until it has had no client for ``orphan_ttl_s``
    seconds. Until then, `attach` can reconnect to it, in this or a later process. Specs with a network allowlist are
    refused.

    Args:
        connection: Connection to the cluster.
        node: The node of the cluster.
        kind: Kind of backend that starts the sandboxes on the node.
        orphan_ttl_s: Seconds without a client after which a sandbox ends, unless its spec sets another value.
    """

    def __init__(
        self, connection: Cluster, node: ClusterNode, *, kind: NodeKind = "local", orphan_ttl_s: float = 30.0
    ) -> None:
        self.node = node
        self._connection = connection
        self._kind: NodeKind = kind
        self._orphan_ttl_s = orphan_ttl_s
        self._started: Actor | None = None
        self._opened: Answer = {}
        self._request_ids = count(1)
        self._channels: dict[int, AgentChannel | None] = {}
        self._sandboxes = LiveSandboxes("ray")
        self._lost: Cause | None = None
        self._is_leaving = False

    def capabilities(self) -> Mapping[str, bool]:
        """Return whether the node enforces each limit; see `envkit.protocols.SandboxBackend.capabilities`."""
        if not self._opened:
            raise SandboxError("the backend is not open; use 'async with'")
        return {str(name): bool(is_enforced) for name, is_enforced in self._opened["capabilities"].items()}

    async def start(self, spec: SandboxSpec) -> AgentSandbox:
        """Start a sandbox on the node; see `envkit.protocols.SandboxBackend.start`."""
        return await self._start(spec, None)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> AgentSandbox:
        """Start a sandbox with the files of `snapshot`, which must come from a sandbox of this backend object."""
        return await self._start(spec, snapshot)

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return the size of a snapshot on the node's disk in bytes; 0 if it does not exist."""
        return int((await self._actor.ask("snapshot_bytes", snapshot))["bytes"])

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot from the node; idempotent."""
        await self._actor.ask("remove_snapshot", snapshot)

    async def attach(self, sandbox_id: str) -> AgentSandbox:
        """Reconnect to a detached sandbox on this node that an earlier `RayNodeBackend` started, and return it.

        Raises:
            SandboxError: The node has no such sandbox, or does not answer.
        """
        request_id = self._new_request_id()
        with anyio.move_on_after(_ATTACH_S):
            answer = self._actor.ask("attach", request_id, sandbox_id, self._orphan_ttl_s)
            return await self._admitted(request_id, answer, SandboxSpec(detached=True))
        raise SandboxError(f"node {self.node.name} did not attach to {sandbox_id!r} within {_ATTACH_S:g} s")

    async def list_detached(self, ledger: str) -> list[str]:
        """Return the ids of the detached sandboxes on the node's machine whose spec names the ledger id `ledger`."""
        return [str(sandbox_id) for sandbox_id in (await self._actor.ask("list_detached", ledger))["ids"]]

    async def remove(self, sandbox_id: str) -> None:
        """Kill a detached sandbox on this node. Raises the same errors as `attach`."""
        await self._actor.ask("remove", sandbox_id)

    def lose(self, cause: Cause) -> None:
        """Record that the node and all its sandboxes are lost because of `cause`. A second call has no effect."""
        self._lost = self._lost or cause
        for channel in list(self._channels.values()):
            if channel is not None:
                channel.fail(self._lost)

    async def wait(self) -> Cause:
        """Wait until the node is lost: its actor has exited, or has not answered for 3 s. Return the cause."""
        answered_at = clock.now()
        while not self._lost:
            if await self._actor.is_reached(max(answered_at + _SILENT_S - clock.now(), _PING_EVERY_S)):
                answered_at = clock.now()
                await anyio.sleep(_PING_EVERY_S)
            elif clock.now() - answered_at >= _SILENT_S or await self._is_refused():
                self.lose(self._gone)
            else:
                await anyio.sleep(_RETRY_S)
        return self._lost

    async def __aenter__(self) -> Self:
        try:
            with anyio.move_on_after(_OPEN_S) as limit:
                self._started = self._connection.actor(self.node)
                await self._started.begin(self._kind)
                self._opened = await self._actor.ask("opened")
            if limit.cancelled_caught:
                raise SandboxError(f"node {self.node.name}: no Ray worker was ready within {_OPEN_S:g} s")
        except BaseException:
            await self._end_actor()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_leaving = True
        with anyio.CancelScope(shield=True):
            try:
                await self._sandboxes.close()
                if not self._lost:
                    with anyio.move_on_after(_CLOSE_S), suppress(UnreachedError):
                        await self._actor.ask("close")
            finally:
                await self._end_actor()

    @property
    def _actor(self) -> Actor:
        if self._started is None:
            raise SandboxError("the backend is not open; use 'async with'")
        return self._started

    @property
    def _gone(self) -> Cause:
        away = ", and the cluster's head does not answer" if self._connection.is_silent else ""
        return Cause(CauseKind.NODE_LOST, f"node {self.node.name} of the Ray cluster is lost{away}")

    def _new_request_id(self) -> int:
        """Return a new id that names a sandbox in messages to the actor, even before the sandbox has its own id.

        Raises:
            SandboxError: The backend is not open, or the node is lost.
        """
        if not self._opened or self._is_leaving:
            raise SandboxError("the backend is not open; use 'async with'")
        if self._lost:
            raise SandboxError(str(self._lost))
        return next(self._request_ids)

    async def _start(self, spec: SandboxSpec, snapshot: str | None) -> AgentSandbox:
        request_id = self._new_request_id()
        orphan_ttl_s = self._orphan_ttl_s if spec.orphan_ttl_s is None else spec.orphan_ttl_s
        try:
            with anyio.move_on_after(spec.start_timeout_s + _SLACK_S):
                answer = self._actor.ask("start", request_id, spec, orphan_ttl_s, snapshot)
                return await self._admitted(request_id, answer, spec)
        except SandboxStartError:
            raise
        except SandboxError as error:
            raise SandboxStartError(f"{self.node.name}/{request_id}", str(error)) from None
        raise SandboxStartError(f"{self.node.name}/{request_id}", f"not ready after {spec.start_timeout_s:g} s")

    async def _admitted(self, request_id: int, answer: Awaitable[Answer], spec: SandboxSpec) -> AgentSandbox:
        """Await `answer`, connect to the sandbox that the actor started, and return the sandbox; stop it on failure."""
        self._channels[request_id] = None
        try:
            made = await answer
            connected = await self._open_channel(request_id)
        except BaseException:
            with anyio.move_on_after(_STOP_S, shield=True), suppress(EnvkitError):
                # If this call fails, the sandbox ends itself after its orphan timeout.
                await self._actor.ask("stop", request_id)
            del self._channels[request_id]
            raise
        channel = self._channels[request_id] = AgentChannel(await SocketStream.open(connected))
        exits: list[Cause] = []
        resources = HostResources(
            cause=partial(self._cause, request_id, exits),
            kill=partial(self._end, request_id, spec.detached),
            snapshot=partial(self._snapshot, request_id),
            unenforced=tuple(made["unenforced"]),
            diagnose=partial(self._diagnose, request_id),
        )
        sandbox = AgentSandbox(
            str(made["id"]), channel, resources, work=str(made["work"]), forget=self._sandboxes.forget
        )
        self._sandboxes.add(sandbox)
        try:
            await sandbox.started({}, spec.start_timeout_s)
        except SandboxStartError as error:
            if exits:  # the sandbox has ended: report why, instead of the broken connection
                raise not_ready(error.sandbox_id, error.cause) from None
            raise
        return sandbox

    async def _open_channel(self, request_id: int) -> socket.socket:
        """Return a connection to the sandbox of `request_id`. The node's actor relays it to the sandbox.

        Raises:
            SandboxError: The node is not reachable.
        """
        try:
            return await self._connected(greeting(str(self._opened["secret"]), request_id))
        except OSError as error:  # including TimeoutError
            why = error.strerror or f"no answer within {_DIAL_TIMEOUT_S:g} s"
            address = f"{self._opened['host']}:{self._opened['port']}"
            raise SandboxError(f"node {self.node.name} is not reachable at {address}: {why}") from None

    async def _is_refused(self) -> bool:
        """Return whether the actor's TCP port refuses connections, which means that the actor has exited."""
        try:
            (await self._connected(b"")).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False

    async def _connected(self, first: bytes) -> socket.socket:
        """Connect to the actor's TCP port within 10 s and send `first`; raise `OSError` if this fails."""
        host, port = str(self._opened["host"]), int(self._opened["port"])
        connected = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            tune(connected)
            connected.setblocking(False)
            loop = asyncio.get_running_loop()
            with anyio.fail_after(_DIAL_TIMEOUT_S):
                await loop.sock_connect(connected, (host, port))
                await loop.sock_sendall(connected, first)
        except BaseException:
            connected.close()
            raise
        return connected

    async def _cause(self, request_id: int, exits: list[Cause], survived: Survived) -> Cause:
        """Return why the connection to a sandbox ended. If the sandbox itself has ended, add the cause to `exits`."""
        with anyio.move_on_after(_CAUSE_S), suppress(EnvkitError):
            if (plain := (await self._actor.ask("cause", request_id))["cause"]) is None:
                return Cause(CauseKind.NODE_LOST, f"the connection to node {self.node.name} broke")
            exits.append(Cause.of(plain))
            return exits[-1]
        return self._gone

    async def _end(self, request_id: int, is_detached: bool) -> None:
        try:
            if self._lost or (is_detached and self._is_leaving):
                return
            with anyio.move_on_after(_STOP_S) as limit, suppress(UnreachedError):
                # If this call fails, the sandbox ends itself after its orphan timeout.
                await self._actor.ask("stop", request_id)
            if limit.cancelled_caught:
                raise SandboxError(f"node {self.node.name} did not stop the sandbox within {_STOP_S:g} s")
        finally:
            self._channels.pop(request_id, None)

    async def _snapshot(self, request_id: int) -> str:
        return str((await self._actor.ask("snapshot", request_id))["name"])

    async def _diagnose(self, request_id: int) -> Blocked:
        with anyio.move_on_after(_DIAGNOSE_S):
            return Blocked(str((await self._actor.ask("diagnose", request_id))["diagnose"]))
        return Blocked.UNKNOWN

    async def _end_actor(self) -> None:
        if self._started is not None:
            with anyio.CancelScope(shield=True):
                await self._started.end()
