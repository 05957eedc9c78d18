"""A connection to a Ray cluster: lists the cluster's nodes, and starts and calls one actor of envkit on each node.

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
"""Future of a pair: the outcome of a call, and the value that it returned or the reason why it failed."""

_log = logging.getLogger(__name__)

_CONNECT_S = 60.0
_WARN_AFTER_S = 5.0
_SILENT_S = 4.0
_LEAVE_S = 5.0
_LAST_WORDS_S = 0.5
_STDERR_BYTES = 32 << 10
_SECOND_CHANCE_S = 0.5
"""Seconds added to a timeout. A delayed event loop may process the timeout before an answer that came in time."""
_ERROR = re.compile(rb"^\[[^]]* [ECF] [^]]*\] (?:\([^)]*\) )?[\w.]+:\d+: +(.*?)(?:\. .*)?$", re.MULTILINE)
"""An error line in the log of Ray's C++ code. The group is the first sentence of the message."""
_ANOTHER_HEAD = b"WrongClusterID"
_LINE_CHARACTERS = 300


class UnreachedError(SandboxError):
    """An actor has exited or is not reachable, or the connection to the cluster has ended."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of a Ray cluster.

    Attributes:
        id: Ray's id of the node.
        name: Name of the node in pools and messages: Ray's name of the node (by default its address), a hyphen, and the
            first 8 characters of `id`.
        address: IP address of the node.
        resources: Total resources of the node, by Ray's names: ``CPU``, ``memory`` in bytes, and custom resources.
    """

    id: str
    name: str
    address: str
    resources: Mapping[str, float]


class Cluster:
    """A connection to a Ray cluster. Use it with ``async with``: the end of the block disconnects and ends the actors.

    Args:
        address: Address of the cluster's head, such as ``"10.0.0.1:6379"``; ``"auto"`` means ``$RAY_ADDRESS`` or, if it
            is not set, a head on this machine.

    Attributes:
        is_silent: Whether the head did not answer the last query.

    Raises:
        UsageError: On entering the block: Ray is not installed, or there is no cluster at `address`.
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
            if not self._link.hello.done():  # the child may hang in Ray's connect call, and not exit by itself
                self._transport.kill()
            await self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leave()

    async def alive(self) -> list[ClusterNode] | None:
        """Return the nodes that Ray considers alive; None if the cluster's head did not answer within 4 s.

        Lost nodes may be among them, because Ray notices the loss of a node only after many seconds.

        Raises:
            UnreachedError: The connection to the cluster has ended.
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

    def actor(self, node: ClusterNode) -> Actor:
        """Return a handle for a new actor on `node`. The actor does not run before `Actor.begin`."""
        return Actor(self, node, next(self._numbers))

    async def call(self, what: str, *arguments: object) -> Any:
        """Make a call in the child process; return its value. The child completes it even if the caller is cancelled.

        Raises:
            UnreachedError: The connection to the cluster has ended, or the actor is not reachable.
            SandboxError: The call failed.
        """
        outcome, value = await self.sent(what, *arguments)
        if outcome == "done":
            return value
        raise (UnreachedError if outcome == "unreached" else SandboxError)(str(value))

    def sent(self, what: str, *arguments: object) -> Reply:
        """Send the call `what` to the child process; return the future of its reply, which also reports errors."""
        return self._link.send(next(self._numbers), what, arguments)

    async def _connected(self) -> None:
        """Wait until the child process is connected to the cluster. If this takes more than 5 s, log a warning.

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
            raise UsageError(f"cannot connect to the Ray cluster at {self._location}: {value}")
        if outcome != "done":
            raise UsageError(str(value))

    @property
    def _location(self) -> str:
        """The cluster's address for use in messages and, if known, where that address is configured."""
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
    """A handle with which to start, call and end an `envkit.sandbox.ray.node_agent.NodeActor` on a node."""

    def __init__(self, cluster: Cluster, node: ClusterNode, number: int) -> None:
        self._cluster = cluster
        self._node = node
        self._number = number

    async def begin(self, kind: NodeKind) -> None:
        """Ask Ray to start the actor, and return before it runs. If the start fails later, calls of `ask` fail."""
        await self._cluster.call("make", self._number, self._node.id, kind, self._node.address)

    async def ask(self, method: str, *args: object) -> Answer:
        """Call a method of the actor; return its answer. The actor completes it even if the caller is cancelled.

        Raises:
            UnreachedError: The actor has exited or is not reachable.
            EnvkitError: The method raised this error in the actor.
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
        """End the actor, even if it is starting or has failed; idempotent."""
        with anyio.move_on_after(_LEAVE_S), suppress(SandboxError):
            await self._cluster.call("end", self._number)


class _DriverPipe(asyncio.SubprocessProtocol):
    """The pipes to the child process. `send` is not a coroutine, so that tasks can call it while they are cancelled.

    Attributes:
        hello: Future that says whether the child is connected to the cluster.
        tried: Future of the address at which the child searches for the cluster.
        ended: Set when the child has exited.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._replies: dict[int, Reply] = {}
        self._read = bytearray()
        self._stderr = b""
        self._cause = ""
        self.hello, self.tried = self._expected(HELLO), self._expected(TRIED)

    def send(self, number: int, what: str, arguments: Sequence[object]) -> Reply:
        """Send a call to the child; return the future of its reply: ``"unreached"`` if the child has ended."""
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
                why = "another head has replaced the head of the cluster"
            self._cause = f"Ray ended the connection ({why[:_LINE_CHARACTERS]})"
            self.ended.set()
            for number in list(self._replies):
                self._settle(number, "unreached", self._cause)
