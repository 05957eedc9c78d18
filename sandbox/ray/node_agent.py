"""The Ray actor that starts sandboxes on its node, and relays clients' connections to them.

A client connects by TCP, and sends one line with the actor's secret and the request id of a sandbox. The actor then
relays all bytes between the client and process 1 of that sandbox, in both directions, with backpressure. The bytes
follow the protocol of `envkit.sandbox.agent_client.channel`.

If a sandbox has had no client for ``orphan_ttl_s`` seconds, the actor stops it. If the actor has ended by then, process
1 of the sandbox exits by itself.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import os
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias

import anyio
from anyio.abc import TaskGroup

from envkit import clock
from envkit.errors import EnvkitError, SandboxError, SandboxRefusedError, SandboxStartError, to_problem
from envkit.types import SandboxSpec

from ..agent_client.sandbox import AgentSandbox
from ..agent_client.socket_stream import SocketStream
from ..bubblewrap.backend import LocalBackend
from ..docker.backend import DockerBackend

NodeKind: TypeAlias = Literal["local", "docker"]
"""Kind of backend on a node. Not ``process``, whose sandboxes have no control socket for new connections."""
Answer: TypeAlias = dict[str, Any]
"""Results by name, or an error under the name ``problem``; see `envkit.errors.to_problem`."""

P = ParamSpec("P")
_BACKENDS = {"local": LocalBackend, "docker": DockerBackend}
_TICK_S = 0.5
_CAUSE_S = 1.5
_GREETING_S = 10.0
_GREETING_BYTES = 256
_LAST_BYTES_S = 10.0
_WAITING = 1024
"""Maximum number of connections that wait to be accepted."""
_FULL_S = 0.1


def greeting(secret: str, request_id: int) -> bytes:
    """Return the first line that a client sends on a new connection, to reach the sandbox of `request_id`."""
    return f"{secret} {request_id}\n".encode()


def tune(connected: socket.socket) -> None:
    """Configure a TCP socket to send small messages immediately, and to notice the loss of its peer in 20 s."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _answers(method: Callable[P, Awaitable[Answer]]) -> Callable[P, Coroutine[Any, Any, Answer]]:
    """Decorate a method of the actor so that it returns errors as an `Answer` instead of raising them."""

    @wraps(method)
    async def answered(*args: P.args, **kwargs: P.kwargs) -> Answer:
        try:
            return await method(*args, **kwargs)
        except (EnvkitError, OSError) as error:
            return _problem(error)

    return answered


@dataclass(slots=True)
class _Hosted:
    """A sandbox of the actor, its number of connected clients, and when the last client disconnected."""

    sandbox: AgentSandbox
    orphan_ttl_s: float
    is_detached: bool
    left_at: float
    clients: int = 0


class NodeActor:
    """The actor of one node. `serve` runs until the actor is closed, concurrently with the other methods.

    Clients choose a request id for each sandbox, and pass it to all methods, so that they can cancel a start before the
    sandbox has an id. Methods do not raise errors, but return them as an `Answer`.

    Args:
        kind: Kind of backend that starts the sandboxes.
        address: IP address of the node, on which the actor listens for clients.
    """

    def __init__(self, kind: NodeKind, address: str) -> None:
        self._backend = _BACKENDS[kind]()
        self._address = address
        self._port = 0
        self._secret = secrets.token_hex(32)
        # Suffix of snapshot names, which tells the snapshots of this actor from those of earlier actors.
        self._run = secrets.token_hex(4)
        self._hosted: dict[int, _Hosted] = {}
        self._starting: dict[int, anyio.CancelScope] = {}
        self._failure: Answer = {}
        self._opened = anyio.Event()
        self._closing = anyio.Event()
        self._closed = anyio.Event()

    async def serve(self) -> None:
        """Open the backend, and serve clients until `close` is called. If the opening fails, `opened` returns why."""
        try:
            with _listener(self._address) as listener:
                async with self._backend, anyio.create_task_group() as tasks:
                    _reset_inherited_limits()
                    self._port = int(listener.getsockname()[1])
                    tasks.start_soon(self._accept, listener, tasks)
                    tasks.start_soon(self._sweep, tasks)
                    self._opened.set()
                    await self._closing.wait()
                    await self._stop_all()
                    tasks.cancel_scope.cancel()
        except (EnvkitError, OSError) as error:
            self._failure = _problem(error)
        finally:
            self._opened.set()
            self._closed.set()

    async def opened(self) -> Answer:
        """Wait until the actor is open; return ``host``, ``port`` and ``secret`` for clients, and ``capabilities``."""
        await self._opened.wait()
        if self._failure:
            return self._failure
        return {
            "host": self._address,
            "port": self._port,
            "secret": self._secret,
            "capabilities": dict(self._backend.capabilities()),
        }

    async def ping(self) -> Answer:
        return {}

    async def close(self) -> Answer:
        """Stop all sandboxes except detached ones, end `serve`, and wait until it has ended."""
        self._closing.set()
        await self._closed.wait()
        return self._failure

    @_answers
    async def start(self, request_id: int, spec: SandboxSpec, orphan_ttl_s: float, snapshot: str | None) -> Answer:
        """Start a sandbox, with the files of `snapshot` if given; return its ``id``, ``work`` and ``unenforced``."""
        # A spec without a ledger gets the id of a ledger that no pool has, so that no pool removes the sandbox.
        ledger = spec.ledger or f"ray-{self._run}"
        # Start every sandbox as detached, because only detached sandboxes have a control socket for clients.
        detached = replace(spec, detached=True, orphan_ttl_s=orphan_ttl_s, ledger=ledger)
        with anyio.CancelScope() as scope:
            self._starting[request_id] = scope
            try:
                if snapshot is None:
                    sandbox = await self._backend.start(detached)
                else:
                    name, _, run = snapshot.rpartition("@")
                    if run != self._run:
                        raise SandboxRefusedError(f"#{request_id}", f"there is no snapshot {snapshot!r} on this node")
                    sandbox = await self._backend.restore(name, detached)
            finally:
                del self._starting[request_id]
            return self._admit(request_id, _Hosted(sandbox, orphan_ttl_s, spec.detached, clock.now()))
        raise SandboxStartError(f"#{request_id}", "the start was cancelled")

    @_answers
    async def attach(self, request_id: int, sandbox_id: str, orphan_ttl_s: float) -> Answer:
        """Reconnect to a detached sandbox that an earlier actor on this node started; return the same as `start`."""
        sandbox = await self._backend.attach(sandbox_id)
        return self._admit(request_id, _Hosted(sandbox, orphan_ttl_s, is_detached=True, left_at=clock.now()))

    @_answers
    async def list_detached(self, ledger: str) -> Answer:
        """Return as ``ids`` the ids of the detached sandboxes on this machine whose spec has the ledger id `ledger`."""
        return {"ids": await self._backend.list_detached(ledger)}

    @_answers
    async def remove(self, sandbox_id: str) -> Answer:
        """Kill a detached sandbox that an earlier actor of this node started."""
        await self._backend.remove(sandbox_id)
        return {}

    def _admit(self, request_id: int, hosted: _Hosted) -> Answer:
        self._hosted[request_id] = hosted
        return {"id": hosted.sandbox.id, "work": hosted.sandbox.work, "unenforced": list(hosted.sandbox.unenforced)}

    @_answers
    async def stop(self, request_id: int) -> Answer:
        """Stop a sandbox, or cancel its start, and wait until it is fully removed; idempotent."""
        if (scope := self._starting.get(request_id)) is not None:
            scope.cancel()
        if (hosted := self._hosted.get(request_id)) is not None:
            await hosted.sandbox.stop()
            self._hosted.pop(request_id, None)
        return {}

    @_answers
    async def cause(self, request_id: int) -> Answer:
        """Wait up to 1.5 s for the end of a sandbox; return as ``cause`` why it ended, or None if it has not ended."""
        with anyio.move_on_after(_CAUSE_S):
            return {"cause": (await self._find(request_id).sandbox.wait()).plain()}
        return {"cause": None}

    @_answers
    async def diagnose(self, request_id: int) -> Answer:
        """Return as ``diagnose`` the reason why a sandbox does not answer; see `AgentSandbox.diagnose`."""
        return {"diagnose": await self._find(request_id).sandbox.diagnose()}

    @_answers
    async def snapshot(self, request_id: int) -> Answer:
        """Take a snapshot of a sandbox; return as ``name`` the name of the snapshot."""
        return {"name": f"{await self._find(request_id).sandbox.snapshot()}@{self._run}"}

    @_answers
    async def snapshot_bytes(self, snapshot: str) -> Answer:
        """Return as ``bytes`` the size of a snapshot on disk; 0 if it does not exist."""
        name, _, run = snapshot.rpartition("@")
        return {"bytes": await self._backend.snapshot_bytes(name) if run == self._run else 0}

    @_answers
    async def remove_snapshot(self, snapshot: str) -> Answer:
        """Remove a snapshot. Snapshots of earlier actors are ignored, because they no longer exist."""
        name, _, run = snapshot.rpartition("@")
        if run == self._run:
            await self._backend.remove_snapshot(name)
        return {}

    def _find(self, request_id: int) -> _Hosted:
        if request_id not in self._hosted:
            raise SandboxError("the node has no such sandbox")
        return self._hosted[request_id]

    async def _stop_all(self) -> None:
        for scope in self._starting.values():
            scope.cancel()
        async with anyio.create_task_group() as tasks:
            for request_id, hosted in self._hosted.items():
                if not hosted.is_detached:
                    tasks.start_soon(self.stop, request_id)

    async def _sweep(self, tasks: TaskGroup) -> None:
        """Check all sandboxes at intervals, and stop those that have had no client for ``orphan_ttl_s`` seconds."""
        while True:
            await anyio.sleep(_TICK_S)
            for request_id, hosted in self._hosted.items():
                if not hosted.clients and clock.now() - hosted.left_at >= hosted.orphan_ttl_s:
                    hosted.left_at = math.inf  # do not repeat a stop that fails: process 1 has the same timeout
                    tasks.start_soon(self.stop, request_id)

    async def _accept(self, listener: socket.socket, tasks: TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, _ = await loop.sock_accept(listener)
            except OSError:  # the process has no file descriptors left, or the client has disconnected
                await anyio.sleep(_FULL_S)
                continue
            tasks.start_soon(self._receive, connected)

    async def _receive(self, connected: socket.socket) -> None:
        stream = await SocketStream.open(connected)
        try:
            tune(connected)
            line_bytes = b""
            with anyio.move_on_after(_GREETING_S):
                while (
                    b"\n" not in line_bytes and len(line_bytes) < _GREETING_BYTES and (chunk := await stream.receive())
                ):
                    line_bytes += chunk
            line, _, rest = line_bytes.partition(b"\n")
            secret, _, request_id = line.partition(b" ")
            if not hmac.compare_digest(secret, self._secret.encode()) or not request_id.isdigit():
                return
            if (hosted := self._hosted.get(int(request_id))) is not None:
                await self._relay(stream, hosted, rest)
        except (EnvkitError, OSError):
            pass  # the sandbox or the client has ended; the client notices the closed stream
        finally:
            stream.close()

    async def _relay(self, client: SocketStream, hosted: _Hosted, first: bytes) -> None:
        control = await SocketStream.open(await self._backend.open_channel(hosted.sandbox.id))
        hosted.clients += 1
        try:
            await control.send(first)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_carry, client, control, tasks)
                await _carry(control, client, tasks)
        finally:
            hosted.clients -= 1
            hosted.left_at = clock.now()
            control.close()


async def _carry(source: SocketStream, target: SocketStream, both: TaskGroup) -> None:
    """Relay bytes from `source` to `target` until `source` ends and `target` has them; then cancel both directions."""
    with suppress(OSError):
        while data := await source.receive():
            await target.send(data)
        with anyio.move_on_after(_LAST_BYTES_S):
            await target.end()
    both.cancel_scope.cancel()


def _problem(error: EnvkitError | OSError) -> Answer:
    return {"problem": to_problem(error if isinstance(error, EnvkitError) else SandboxError(str(error)))}


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=_WAITING)
    listener.setblocking(False)
    return listener


def _reset_inherited_limits() -> None:
    """Undo settings by Ray that sandboxes would inherit from this process: priority, OOM score, open-file limit."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # the priority of this thread, which starts the sandboxes
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
