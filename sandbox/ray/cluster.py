"""A connection to a Ray cluster, which lists the cluster's nodes and manages one envkit actor on each node.

Ray runs only in a child process (`envkit.sandbox.ray.driver_process`), because Ray may end the process that it runs in.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Self, TypeAlias, cast

import anyio

from envkit.errors import SandboxError, UsageError, from_problem

from . import driver_process
from .driver_process import HELLO, LENGTH, TRIED, Outcome, packed
from .node_agent import Answer, NodeKind

Reply: TypeAlias = asyncio.Future[tuple[Outcome, Any]]
"""Future with the outcome of a call, and the call's value or the reason for its failure."""

_log = logging.getLogger(__name__)

_CONNECT_S = 60.0
_WARN_AFTER_S = 5.0
_SILENT_S = 4.0
_LEAVE_S = 5.0
_LAST_WORDS_S = 0.5
_STDERR_BYTES = 32 << 10
_SECOND_CHANCE_S = 0.5
"""Seconds added after a timeout: a delayed event loop may notice the timeout before an answer that has arrived."""
_ERROR = re.compile(rb"^\[[^]]* [ECF] [^]]*\] (?:\([^)]*\) )?[\w.]+:\d+: +(.*?)(?:\. .*)?$", re.MULTILINE)
"""Format of errors in Ray's native log; the first sentence is captured."""
_ANOTHER_HEAD = b"WrongClusterID"
_LINE_CHARACTERS = 300


class UnreachedError(SandboxError):
    """An actor or the cluster has exited, or is not reachable."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node in Ray's records.

    Attributes:
        id: Ray's id of the node.
        name: Name of the node in pools and messages: Ray's name (by default the address), and the start of the id.
        address: Address of the node's machine.
        resources: Total resources by Ray's names: ``CPU``, ``memory`` in bytes, and custom resources.
    """

    id: str
    name: str
    address: str
    resources: Mapping[str, float]


class Cluster:
    """A connection to a Ray cluster. Entering the ``async with`` block connects; leaving ends the actors.

    Args:
        address: Address of the head, such as ``"10.0.0.1:6379"``; ``"auto"`` means ``$RAY_ADDRESS`` or a local head.

    Attributes:
        is_silent: Whether the head did not answer the last query.

    Raises:
        UsageError: Entering the block raises it if Ray is not installed, or there is no cluster.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._numbers = count(1)
        self.is_silent = False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        argv = [sys.executable, "-P", "-m", driver_process.__name__, self._address]
        paths = os.pathsep.join(path for path in sys.path if path)
        self._transport, self._link = await loop.subprocess_exec(
            _DriverPipe, *argv, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True
        )
        try:
            await self._connected()
        except BaseException:
            if not self._link.hello.done():  # the child process may hang in Ray's connect call, so kill it
                self._transport.kill()
            await self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leave()

    async def alive(self) -> list[ClusterNode] | None:
        """Return the nodes that Ray considers alive; None if the cluster's head did not answer within 4 s.

        Ray notices the loss of a node only after many seconds.

        Raises:
            UnreachedError: The connection has ended.
        """
        with anyio.move_on_after(_SILENT_S):
            found = await self.call("nodes")
            self.is_silent = False
            return [
                ClusterNode(node_id, f"{name}-{node_id[:8]}".replace("/", "-"), address, resources)
                for node_id, name, address, resources in found
            ]
        self.is_silent = True
        return None

    async def request(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Request nodes from Ray's autoscaler with room for all `bundles` of resources; replaces the last request.

        Raises:
            SandboxError: The autoscaler does not answer, or the connection has ended.
        """
        with anyio.move_on_after(_SILENT_S):
            await self.call("request", bundles)
            return
        raise SandboxError(f"the cluster's head did not answer within {_SILENT_S:g} s")

    def actor(self, node: ClusterNode) -> Actor:
        """Return the handle of a new actor for a node; `Actor.begin` starts the actor."""
        return Actor(self, node, next(self._numbers))

    async def call(self, what: str, *arguments: object) -> Any:
        """Make a call in the child process and return its value. If cancelled, the child still completes the call.

        Raises:
            UnreachedError: The connection has ended, or the actor is not reachable.
            SandboxError: The call failed.
        """
        outcome, value = await self.sent(what, *arguments)
        if outcome == "done":
            return value
        raise (UnreachedError if outcome == "unreached" else SandboxError)(str(value))

    def sent(self, what: str, *arguments: object) -> Reply:
        """Send a call to the child process and return a future of its outcome; the future never raises."""
        return self._link.send(next(self._numbers), what, arguments)

    async def _connected(self) -> None:
        """Wait until the child is connected to the cluster; log a warning after 5 s.

        Raises:
            UsageError: There is no such cluster, it refuses the connection, or it does not answer within 60 s.
        """
        hello = self._link.hello
        await asyncio.wait([hello], timeout=_WARN_AFTER_S)
        if not hello.done():
            _log.warning("waiting for the Ray cluster at %s", self._location)
            await asyncio.wait([hello], timeout=_CONNECT_S - _WARN_AFTER_S)
        if not hello.done():
            raise UsageError(
                f"the Ray cluster at {self._location} did not accept the connection within {_CONNECT_S:g} s"
            )
        outcome, value = hello.result()
        if outcome == "unreached":
            raise UsageError(f"connecting to the Ray cluster at {self._location}: {value}")
        if outcome != "done":
            raise UsageError(str(value))

    @property
    def _location(self) -> str:
        """The cluster's address for use in messages, with the place where the address is configured, if known."""
        tried = self._link.tried
        return str(tried.result()[1]) if tried.done() and tried.result()[0] == "done" else repr(self._address)

    async def _leave(self) -> None:
        self._link.finish()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(_LEAVE_S) as limit:
                await self._link.ended.wait()
            if limit.cancelled_caught:
                self._transport.kill()
                await self._link.ended.wait()
        self._transport.close()


class Actor:
    """A handle to an `envkit.sandbox.ray.node_agent.NodeActor` on a node."""

    def __init__(self, cluster: Cluster, node: ClusterNode, number: int) -> None:
        self._cluster = cluster
        self._node = node
        self._number = number

    async def begin(self, kind: NodeKind) -> None:
        """Request the start of the actor, and do not wait until it runs. If the start fails, calls of `ask` fail."""
        await self._cluster.call("make", self._number, self._node.id, kind, self._node.address)

    async def ask(self, method: str, *args: object) -> Answer:
        """Call a method of the actor and return its answer. If cancelled, the actor still completes the call.

        Raises:
            UnreachedError: The actor has exited or is not reachable.
            EnvkitError: The actor's answer is this error.
        """
        try:
            answer: Answer = await self._cluster.call("ask", self._number, method, args)
        except SandboxError as error:
            raise type(error)(f"node {self._node.name}: {error}") from None
        if "problem" in answer:
            raise from_problem(answer["problem"])
        return answer

    async def is_reached(self, timeout_s: float) -> bool:
        """Return whether the actor answers a ping within `timeout_s` seconds."""
        reply = self._cluster.sent("ask", self._number, "ping", ())
        try:
            for wait_s in (timeout_s, _SECOND_CHANCE_S):
                if not reply.done():
                    await asyncio.wait([reply], timeout=wait_s)
            return reply.done() and reply.result()[0] == "done"
        finally:
            reply.cancel()

    async def end(self) -> None:
        """End the actor, even if it is starting or has failed; repeated calls have no effect."""
        with anyio.move_on_after(_LEAVE_S), suppress(SandboxError):
            await self._cluster.call("end", self._number)


class _DriverPipe(asyncio.SubprocessProtocol):
    """The pipes to the child process. `send` does not wait, so a cancelled caller can still send a call.

    Attributes:
        hello: Future with the outcome of the child's connection to the cluster.
        tried: Future with the address where the child searches for the cluster.
        ended: Set once the child has exited.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._replies: dict[int, Reply] = {}
        self._read = bytearray()
        self._stderr = b""
        self._cause = ""
        self.hello, self.tried = self._expected(HELLO), self._expected(TRIED)

    def send(self, number: int, what: str, arguments: Sequence[object]) -> Reply:
        """Send a call to the child and return a future of its reply; an exited child replies ``"unreached"``."""
        reply = self._expected(number)
        if self._cause:
            reply.set_result(("unreached", self._cause))
        else:
            self._input.write(packed((number, what, arguments)))
        return reply

    def finish(self) -> None:
        """Close the child's standard input, which makes it exit."""
        self._input.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Cast instead of checking with isinstance: uvloop's transports are not subclasses of SubprocessTransport.
        self._process = cast(asyncio.SubprocessTransport, transport)
        self._input = cast(asyncio.WriteTransport, self._process.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._stderr = (self._stderr + data)[-_STDERR_BYTES:]
            return
        self._read += data
        while len(self._read) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._read)[0]
            if len(self._read) < end:
                return
            number, outcome, value = pickle.loads(self._read[LENGTH.size : end])
            del self._read[:end]
            self._settle(number, outcome, value)

    def process_exited(self) -> None:
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _expected(self, number: int) -> Reply:
        reply: Reply = asyncio.get_running_loop().create_future()
        reply.add_done_callback(lambda _: self._replies.pop(number, None))
        self._replies[number] = reply
        return reply

    def _settle(self, number: int, outcome: Outcome, value: object) -> None:
        reply = self._replies.get(number)
        if reply is not None and not reply.done():
            reply.set_result((outcome, value))

    def _end(self) -> None:
        if not self._cause:
            errors = _ERROR.findall(self._stderr)
            why = errors[-1].decode(errors="replace") if errors else f"code {self._process.get_returncode()}"
            if _ANOTHER_HEAD in self._stderr:
                why = "another head has replaced the cluster's"
            self._cause = f"Ray ended the connection ({why[:_LINE_CHARACTERS]})"
            self.ended.set()
            for number in list(self._replies):
                self._settle(number, "unreached", self._cause)
