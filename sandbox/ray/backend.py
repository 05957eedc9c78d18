"""One node of a Ray cluster as a place for sandboxes.

On the node lives an actor (`envkit.sandbox.ray.node_agent`) that starts boxes there and stops them; that is all that
goes by way of Ray. Calls to a box go over a TCP connection between us and the node, as they would over any other
channel, and break with it: a box whose node is gone is lost at once, whatever Ray knows of it.

The node needs envkit, root, and bubblewrap or a Docker daemon; we must be on a machine of the cluster.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from types import TracebackType
from typing import Self

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxError, SandboxStartError
from envkit.types import Cause, CauseKind, SandboxSpec

from ..agent_client.channel import AgentChannel, SocketStream, Survived
from ..agent_client.resources import HostResources
from ..agent_client.sandbox import AgentSandbox
from ..host.instances import LiveSandboxes, not_ready
from .cluster import Actor, Cluster, ClusterNode, UnreachedError
from .node_agent import Answer, NodeKind, greeting, tune

_OPEN_S = 60.0
"""A worker of Ray takes seconds to start, on a busy machine many."""
_CLOSE_S = 20.0
_CAUSE_S = 2.0
_LOOK_S = 2.0
_DIAL_S = 10.0
_ATTACH_S = 10.0
_STOP_S = 12.0
_SLACK_S = 5.0
"""What a start may take longer than its box's bound, for the way there and back."""
_PING_EVERY_S = 1.0
_SILENT_S = 3.0
"""Seconds without an answer after which an actor counts as lost."""
_RETRY_S = 0.2


class RayNodeBackend:
    """Starts boxes on one node; satisfies `envkit.protocols.SandboxBackend`.

    Used as ``async with``, while we are connected. Leaving the block stops its boxes, except those that stay, and ends
    the actor. Those that stay are found again by `attach`, in this process or a later one, until nobody has
    been connected to them for their ``orphan_ttl_s``. A network of named hosts is refused.

    Args:
        connection: The connection to its cluster.
        node: Which node.
        kind: The backend that is used there.
        orphan_ttl_s: Seconds after which a box ends that nobody is connected to, where its spec does not say.
    """

    def __init__(
        self, connection: Cluster, node: ClusterNode, *, kind: NodeKind = "local", orphan_ttl_s: float = 30.0
    ) -> None:
        self.node = node
        self._connection = connection
        self._kind: NodeKind = kind
        self._lonely_s = orphan_ttl_s
        self._started: Actor | None = None
        self._opened: Answer = {}
        self._tickets = count(1)
        self._channels: dict[int, AgentChannel | None] = {}
        self._boxes = LiveSandboxes("ray")
        self._lost: Cause | None = None
        self._is_leaving = False

    @property
    def is_empty(self) -> bool:
        """Whether it has no box, and starts none."""
        return not self._channels

    def capabilities(self) -> Mapping[str, bool]:
        """Say what is enforced on the node."""
        if not self._opened:
            raise SandboxError("the backend is not open; use 'async with'")
        return {str(name): bool(holds) for name, holds in self._opened["capabilities"].items()}

    async def start(self, spec: SandboxSpec) -> AgentSandbox:
        """Start `spec`; see `envkit.protocols.SandboxBackend.start`."""
        return await self._start(spec, None)

    async def restore(self, snapshot: str, spec: SandboxSpec) -> AgentSandbox:
        """Start `spec` with the files of `snapshot`, which this backend took."""
        return await self._start(spec, snapshot)

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return what a snapshot takes of the node's disk."""
        return int((await self._actor.ask("snapshot_bytes", snapshot))["bytes"])

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot from the node; safe to repeat."""
        await self._actor.ask("remove_snapshot", snapshot)

    async def attach(self, sandbox_id: str) -> AgentSandbox:
        """Return a box that stays on this node, which an earlier backend started.

        Raises:
            SandboxError: There is none of this id, or the node does not answer.
        """
        ticket = self._new_ticket()
        with anyio.move_on_after(_ATTACH_S):
            asked = self._actor.ask("attach", ticket, sandbox_id, self._lonely_s)
            return await self._admitted(ticket, asked, SandboxSpec(detached=True))
        raise SandboxError(f"node {self.node.name} did not come back to {sandbox_id!r} within {_ATTACH_S:g} s")

    async def staying(self, ledger: str) -> list[str]:
        """Return the ids of the boxes of one ledger that stay on this node's machine."""
        return [str(sandbox_id) for sandbox_id in (await self._actor.ask("staying", ledger))["ids"]]

    async def remove(self, sandbox_id: str) -> None:
        """End a box that stays; raises `SandboxError` as `attach`."""
        await self._actor.ask("remove", sandbox_id)

    def lose(self, cause: Cause) -> None:
        """Take note that the node is gone: its boxes are lost at once, for `cause`; safe to repeat."""
        self._lost = self._lost or cause
        for channel in list(self._channels.values()):
            if channel is not None:
                channel.fail(self._lost)

    async def wait(self) -> Cause:
        """Return, once the node is lost, why: its actor is gone, or has not answered for 3 s."""
        heard_at = clock.now()
        while not self._lost:
            if await self._actor.is_reached(max(heard_at + _SILENT_S - clock.now(), _PING_EVERY_S)):
                heard_at = clock.now()
                await anyio.sleep(_PING_EVERY_S)
            elif clock.now() - heard_at >= _SILENT_S or await self._is_refused():
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
                raise SandboxError(f"node {self.node.name}: no worker of Ray was ready within {_OPEN_S:g} s")
        except BaseException:
            await self._end_actor()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_leaving = True
        with anyio.CancelScope(shield=True):
            try:
                await self._boxes.close()
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

    def _new_ticket(self) -> int:
        """Return the number of the next box.

        Raises:
            SandboxError: The backend is not open, or the node is lost.
        """
        if not self._opened or self._is_leaving:
            raise SandboxError("the backend is not open; use 'async with'")
        if self._lost:
            raise SandboxError(str(self._lost))
        return next(self._tickets)

    async def _start(self, spec: SandboxSpec, snapshot: str | None) -> AgentSandbox:
        ticket = self._new_ticket()
        orphan_ttl_s = self._lonely_s if spec.orphan_ttl_s is None else spec.orphan_ttl_s
        try:
            with anyio.move_on_after(spec.start_timeout_s + _SLACK_S):
                asked = self._actor.ask("start", ticket, spec, orphan_ttl_s, snapshot)
                return await self._admitted(ticket, asked, spec)
        except SandboxStartError:
            raise
        except SandboxError as error:
            raise SandboxStartError(f"{self.node.name}/{ticket}", str(error)) from None
        raise SandboxStartError(f"{self.node.name}/{ticket}", f"not ready after {spec.start_timeout_s:g} s")

    async def _admitted(self, ticket: int, asked: Awaitable[Answer], spec: SandboxSpec) -> AgentSandbox:
        """Return the box that the actor was asked for; of one that is not reached nothing is left."""
        self._channels[ticket] = None
        try:
            made = await asked
            connected = await self._dial(ticket)
        except BaseException:
            with anyio.move_on_after(_STOP_S, shield=True), suppress(EnvkitError):
                await self._actor.ask("stop", ticket)  # else it ends because nobody is connected to it
            del self._channels[ticket]
            raise
        channel = self._channels[ticket] = AgentChannel(SocketStream(connected))
        exits: list[Cause] = []
        hold = HostResources(
            cause=partial(self._cause, ticket, exits),
            kill=partial(self._end, ticket, spec.detached),
            snapshot=partial(self._snapshot, ticket),
            unenforced=tuple(made["unenforced"]),
            look=partial(self._look, ticket),
        )
        box = AgentSandbox(str(made["id"]), channel, hold, work=str(made["work"]), forget=self._boxes.forget)
        self._boxes.add(box)
        try:
            await box.started({}, spec.start_timeout_s)
        except SandboxStartError as error:
            if exits:  # it had come up on its node
                raise not_ready(error.sandbox_id, error.cause) from None
            raise
        return box

    async def _dial(self, ticket: int) -> socket.socket:
        """Connect to a box by way of its node.

        Raises:
            SandboxError: The node is not reached there.
        """
        try:
            return await self._connected(greeting(str(self._opened["secret"]), ticket))
        except OSError as error:  # a TimeoutError is one, too
            why = error.strerror or f"no answer within {_DIAL_S:g} s"
            place = f"{self._opened['host']}:{self._opened['port']}"
            raise SandboxError(f"node {self.node.name} is not reached at {place}: {why}") from None

    async def _is_refused(self) -> bool:
        """Say whether nobody listens where the actor did, so that its process is gone."""
        try:
            (await self._connected(b"")).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False

    async def _connected(self, first: bytes) -> socket.socket:
        """Connect to the actor and send it `first`; raises OSError."""
        host, port = str(self._opened["host"]), int(self._opened["port"])
        connected = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            tune(connected)
            connected.setblocking(False)
            loop = asyncio.get_running_loop()
            with anyio.fail_after(_DIAL_S):
                await loop.sock_connect(connected, (host, port))
                await loop.sock_sendall(connected, first)
        except BaseException:
            connected.close()
            raise
        return connected

    async def _cause(self, ticket: int, exits: list[Cause], survived: Survived) -> Cause:
        """Say why a box is gone, and add to `exits` how it ended if it did, as opposed to the way to it."""
        with anyio.move_on_after(_CAUSE_S), suppress(EnvkitError):
            if (plain := (await self._actor.ask("cause", ticket))["cause"]) is None:
                return Cause(CauseKind.NODE_LOST, f"the connection to node {self.node.name} broke")
            exits.append(Cause.of(plain))
            return exits[-1]
        return self._gone

    async def _end(self, ticket: int, stays: bool) -> None:
        try:
            if self._lost or (stays and self._is_leaving):
                return
            with anyio.move_on_after(_STOP_S) as limit, suppress(UnreachedError):
                await self._actor.ask("stop", ticket)  # else it ends because nobody is connected to it
            if limit.cancelled_caught:
                raise SandboxError(f"node {self.node.name} did not end it within {_STOP_S:g} s")
        finally:
            self._channels.pop(ticket, None)

    async def _snapshot(self, ticket: int) -> str:
        return str((await self._actor.ask("snapshot", ticket))["name"])

    async def _look(self, ticket: int) -> str:
        with anyio.move_on_after(_LOOK_S):
            return str((await self._actor.ask("look", ticket))["look"])
        return ""

    async def _end_actor(self) -> None:
        if self._started is not None:
            with anyio.CancelScope(shield=True):
                await self._started.end()
