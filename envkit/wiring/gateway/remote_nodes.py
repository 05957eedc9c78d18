"""The nodes of a gateway that are other machines: connects to them, and keeps them in the pool while they answer."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import anyio
import msgspec

from envkit import __version__, clock
from envkit.config.serving import NodeAddressSection, is_http_url
from envkit.errors import EnvkitError, OptionError, UnreachableError, UsageError, did_you_mean
from envkit.fleet.remote_node import RemoteNode
from envkit.http.auth.caller import Caller
from envkit.http.client.connect import authorization_headers, read_token
from envkit.http.protocol import node_messages as wire
from envkit.http.protocol import operations as table
from envkit.http.protocol.asgi import handles
from envkit.http.protocol.messages import DoneReply, NoBody
from envkit.runs import files
from envkit.sandbox import machine
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.sandbox.transfer import tar_stream
from envkit.types import Cause, CauseKind, SandboxState
from envkit.wiring.gateway.nodes import HERE

_log = logging.getLogger(__name__)

_FIRST_S = 5.0
"""Seconds that the start waits for the known nodes to answer."""
_AGAIN_S = 1.0
"""Seconds between two attempts to reach a node."""
_FORGET_S = 3600.0
"""Seconds after which a lost node that had joined by itself is forgotten."""
_ENVS = ":envs-"
_ALIVE = (SandboxState.STARTING, SandboxState.LEASED, SandboxState.SUSPECT)


def read_address(section: NodeAddressSection) -> wire.JoinFrame:
    """Return the name, the address and the token, if any, of a node that the gateway's file lists.

    Raises:
        UsageError: The file with the token cannot be read.
    """
    token = "" if section.token_file is None else read_token(Path(section.token_file), _log.warning)
    return wire.JoinFrame(name_of(section.url), section.url, token)


@dataclass(slots=True, eq=False)
class _Member:
    """A known node. `node` is its node in the pool, None while it is not used; `why` then says why."""

    name: str
    address: wire.JoinFrame
    is_listed: bool = False
    why: str = "not reached yet"
    node: Node | None = None
    backend: RemoteNode | None = None
    tried: anyio.Event = field(default_factory=anyio.Event)

    def status(self) -> wire.NodeStatus:
        state = "lost" if self.node is None else "draining" if self.node.is_draining else "up"
        facts = None if self.backend is None else self.backend.facts_now
        used = 0 if self.node is None else self.node.used.sandboxes
        return wire.NodeStatus(self.name, self.address.url, state, "" if self.node else self.why, used, facts)


class RemoteNodes:
    """Keeps the nodes on other machines in a pool. Use it with ``async with``, around that of the pool.

    The block begins when each known node has answered or failed. A node that is lost is connected to again.

    Args:
        listed: The nodes that are known from the start, each with its present address.
        file: File that remembers the nodes that have joined, for the next gateway; None to remember none.
        in_image: Whether the sandboxes that run environments have an image; nodes of the other kind are refused.
        isolates: Whether nodes without isolation are refused; None if the first one decides.
        lost_s: Seconds without an answer after which a node is lost.

    Raises:
        UsageError: On entering: two nodes have the same name.
    """

    def __init__(
        self,
        listed: Collection[wire.JoinFrame],
        *,
        file: Path | None,
        in_image: bool,
        isolates: bool | None,
        lost_s: float,
    ) -> None:
        self.isolates = isolates
        """Whether all nodes isolate sandboxes; None as long as there is no node."""
        self.found = anyio.Event()
        """Set when a node is used for the first time."""
        self._listed = listed
        self._file = file
        self._in_image = in_image
        self._lost_s = lost_s
        self._members: dict[str, _Member] = {}
        self._pool: Pool | None = None

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes that are used now."""
        return [one.node for one in self._members.values() if one.node is not None]

    @property
    def processors(self) -> int:
        """Number of processors of the nodes that are used now."""
        return sum(one.backend.facts.processors for one in self._members.values() if one.node and one.backend)

    def states(self) -> list[wire.NodeStatus]:
        """Return the state of each known node."""
        return [one.status() for one in self._members.values()]

    def attach(self, pool: Pool) -> None:
        """Keep the nodes in `pool` from now on."""
        self._pool = pool
        for node in self.nodes:
            pool.add_node(node)

    @handles(table.JOIN)
    async def join(self, body: wire.JoinFrame, caller: Caller) -> DoneReply:
        """Use the sandboxes of a node, until it is lost. The call is safe to repeat."""
        if not is_http_url(body.url) and not re.fullmatch(r"unix:/[^\0]+", body.url):
            raise OptionError("url", f"{body.url!r} is no address of a node, such as http://10.0.0.7:8000")
        try:
            authorization_headers(body.token)
        except UsageError as error:
            raise OptionError("token", str(error)) from None
        known = self._members.get(body.node)
        if body.node == HERE or (known is not None and known.is_listed):
            raise OptionError("node", f"{body.node!r} is the name of another node; start the node with another address")
        if known is None:
            self._add(_Member(body.node, body))
            self._remember()
        elif known.address != body:
            known.address = body
            if known.node is not None and known.backend is not None:
                known.backend.lose("it was restarted")
            self._remember()
        return DoneReply()

    @handles(table.NODE_LIST)
    async def list_nodes(self, body: NoBody, caller: Caller) -> wire.NodesReply:
        """List the server's nodes that are other machines."""
        return wire.NodesReply(self.states())

    @handles(table.DRAIN)
    async def drain(self, body: wire.DrainFrame, caller: Caller) -> wire.NodeStatus:
        """Give a node no new sandboxes, or use it again. Sandboxes of environments move to other nodes at once.

        A drained node can be stopped when it has no sandboxes any more.
        """
        member = self._members.get(body.node)
        if member is None:
            raise OptionError("node", f"there is no node {body.node!r}{did_you_mean(body.node, self._members)}")
        if member.node is None or self._pool is None:
            raise UnreachableError(f"node {body.node} is not used now: {member.why}")
        has_others = self._pool.drain_node(body.node, drains=body.drains)
        if body.drains and has_others:
            for view in self._pool.views(tenant=""):
                if view.node == body.node and view.id.startswith(_ENVS) and view.state in _ALIVE:
                    self._tasks.start_soon(self._pool.stop, view.id)
        return member.status()

    async def __aenter__(self) -> Self:
        members = [_Member(one.node, one, is_listed=True) for one in self._listed]
        for one in members:
            if one.name == HERE or sum(one.name == other.name for other in members) > 1:
                raise UsageError(f"nodes: two nodes have the name {one.name!r}; list each once")
        names = {one.name for one in members}
        members += [one for one in self._remembered() if one.name not in names]
        self._tasks = await anyio.create_task_group().__aenter__()
        for one in members:
            self._add(one)
        with anyio.move_on_after(_FIRST_S):
            for one in members:
                await one.tried.wait()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await clock.end_tasks(self._tasks, error)

    def _add(self, member: _Member) -> None:
        self._members[member.name] = member
        self._tasks.start_soon(self._keep, member)

    async def _keep(self, member: _Member) -> None:
        """Keep a node in the pool while it answers, and connect to it again after each loss."""
        lost_at = clock.now()
        while member.is_listed or clock.now() - lost_at < _FORGET_S:
            member.address = next((one for one in self._listed if one.node == member.name), member.address)
            try:
                if await self._use(member):
                    lost_at = clock.now()
            except EnvkitError as error:
                member.why = str(error)
            except Exception as error:  # an odd node must not end the server
                member.why = f"it cannot be used: {error!r}"
                _log.exception("node %s cannot be used", member.name)
            member.tried.set()
            await anyio.sleep(_AGAIN_S)
        del self._members[member.name]
        self._remember()

    async def _use(self, member: _Member) -> bool:
        """Connect to a node, and keep it in the pool until it is lost. Return True, or False if it was refused."""
        name, url, token = member.name, member.address.url, member.address.token or None
        async with RemoteNode(name, url, token, folder_transport=tar_stream, lost_s=self._lost_s) as backend:
            member.backend, facts = backend, backend.facts
            if (why := why_unfit(facts, in_image=self._in_image, isolates=self.isolates)) is not None:
                if member.why != why:
                    _log.warning("node %s is not used: %s", name, why)
                member.why = why
                return False
            capacity = Capacity(**msgspec.structs.asdict(facts.capacity))
            member.node = Node(name, backend, capacity)
            self.isolates = _isolates(facts) if self.isolates is None else self.isolates
            self.found.set()
            member.tried.set()
            _log.info("node %s is used: %s, %s", name, facts.backend, machine.describe(capacity))
            if facts.version != __version__:
                _log.warning("node %s has envkit %s, this server has %s", name, facts.version, __version__)
            if facts.python != sys.executable and not backend.in_image:
                _log.warning("node %s has no %s, with which it must run environments", name, sys.executable)
            try:
                if self._pool is not None:
                    what = "those of clients and replacements; environments get no more than at the start"
                    _log.info("new sandboxes on node %s will be %s", name, what)
                    self._pool.add_node(member.node)
                cause = await backend.wait()
            except Exception as error:  # an odd answer loses only the node
                cause = Cause(CauseKind.NODE_LOST, f"node {name}: {error!r}")
            finally:
                member.node = None
            member.why = str(cause)
            _log.warning("%s", cause)
            if self._pool is not None:
                self._pool.remove_node(name, cause)
        return True

    def _remembered(self) -> Sequence[_Member]:
        if self._file is None or not self._file.exists():
            return ()
        try:
            found = msgspec.json.decode(self._file.read_bytes(), type=list[wire.JoinFrame])
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError(f"{self._file} cannot be read: {error}; remove it, and the nodes join again") from None
        return [_Member(one.node, one) for one in found]

    def _remember(self) -> None:
        if self._file is not None:
            joined = [one.address for one in self._members.values() if not one.is_listed]
            try:
                files.replace(self._file, msgspec.json.encode(joined), remedy="choose another folder", mode=0o600)
            except UsageError as error:
                _log.warning("the next server will not know the nodes that joined: %s", error)


def name_of(url: str) -> str:
    """Return the name of the node with the address `url`: host and port, or the socket's name."""
    parts = urlsplit(url)
    return parts.netloc.replace("[", "").replace("]", "") or Path(parts.path).name


def _isolates(facts: wire.NodeReply) -> bool:
    return facts.capabilities.get("isolation", False)


def why_unfit(facts: wire.NodeReply, *, in_image: bool, isolates: bool | None) -> str | None:
    """Return why a server cannot use a node; None if it can. The other arguments are those of `RemoteNodes`."""
    if isolates and not _isolates(facts):
        return f"its backend {facts.backend} isolates nothing, unlike other sandboxes of this server"
    if in_image and facts.backend != "docker":
        return f"environments run in an image here, and its backend is {facts.backend}; start it with docker"
    if not in_image and facts.backend == "docker":
        return "its sandboxes are Docker containers; name the image of environments in envs.image"
    return None
