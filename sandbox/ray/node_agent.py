"""What runs on a node of a cluster: it starts boxes there, and carries what callers elsewhere have to say to them.

A caller connects by TCP and sends one line, the actor's secret and the number of a box; from then on the connection is
a channel to that box's agent (`envkit.sandbox.agent_client.channel`). Bytes are carried both ways, and who sends faster
than the other side takes has to wait.

A box without a caller ends after ``orphan_ttl_s`` seconds: we stop it while we run, otherwise its own agent does.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import os
import resource
import secrets
import socket
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

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
"""Which backend a node uses; plain processes have no door by which they could be reached."""
Answer: TypeAlias = dict[str, Any]
"""What was asked for, by name; or a ``problem``, see `envkit.errors.to_problem`."""

_BACKENDS = {"local": LocalBackend, "docker": DockerBackend}
_TICK_S = 0.5
_CAUSE_S = 1.5
_GREETING_S = 10.0
_GREETING_BYTES = 256
_LAST_BYTES_S = 10.0
_WAITING = 1024
"""Connections that may wait to be accepted."""
_FULL_S = 0.1


def greeting(secret: str, ticket: int) -> bytes:
    """Return what a caller says first."""
    return f"{secret} {ticket}\n".encode()


def tune(connected: socket.socket) -> None:
    """Have small frames sent at once, and the loss of the other machine seen within 20 s, by whichever kernel."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(slots=True)
class _Guest:
    """A box, how many callers it has, and when (on the loop's clock) it had the last one."""

    box: AgentSandbox
    orphan_ttl_s: float
    stays: bool
    left_at: float
    callers: int = 0


class NodeActor:
    """The boxes of one node. `serve` runs for as long as it lives, and every other method beside it.

    Boxes are known by tickets, numbers that the caller chooses, so that a start can be given up before the box has an
    id. No method raises: errors are answers too.

    Args:
        kind: Which backend.
        address: The node's own address, which the callers reach.
    """

    def __init__(self, kind: NodeKind, address: str) -> None:
        self._backend = _BACKENDS[kind]()
        self._address = address
        self._port = 0
        self._secret = secrets.token_hex(32)
        self._run = secrets.token_hex(4)  # the next actor of this node counts its snapshots from 1 again
        self._tasks: TaskGroup | None = None
        self._guests: dict[int, _Guest] = {}
        self._starting: dict[int, anyio.CancelScope] = {}
        self._failure: Answer = {}
        self._opened = anyio.Event()
        self._closing = anyio.Event()
        self._closed = anyio.Event()

    async def serve(self) -> None:
        """Be open until `close`; what `opened` answers tells whether that succeeds."""
        try:
            with _listener(self._address) as listener:
                async with self._backend, anyio.create_task_group() as tasks:
                    _free_of_bounds()
                    self._port = int(listener.getsockname()[1])
                    self._tasks = tasks
                    tasks.start_soon(self._accept, listener, tasks)
                    tasks.start_soon(self._sweep, tasks)
                    self._opened.set()
                    await self._closing.wait()
                    await self._end_guests()
                    tasks.cancel_scope.cancel()
        except (EnvkitError, OSError) as error:
            self._failure = _problem(error)
        finally:
            self._tasks = None
            self._opened.set()
            self._closed.set()

    async def opened(self) -> Answer:
        """Return, once it is open, ``host``, ``port`` and ``secret`` for callers, and ``capabilities``."""
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

    async def start(self, ticket: int, spec: SandboxSpec, orphan_ttl_s: float, snapshot: str | None) -> Answer:
        """Start a box, with the files of `snapshot` if there is one; return its ``id``, ``work`` and ``unenforced``."""
        return await _answer(self._start(ticket, spec, orphan_ttl_s, snapshot))

    async def attach(self, ticket: int, sandbox_id: str, orphan_ttl_s: float) -> Answer:
        """Come back to a box that another actor of this node has left running; return as `start`."""
        return await _answer(self._attach(ticket, sandbox_id, orphan_ttl_s))

    async def staying(self, ledger: str) -> Answer:
        """Return the ``ids`` of the boxes of one ledger that stay on this machine."""
        return await _answer(self._staying(ledger))

    async def remove(self, sandbox_id: str) -> Answer:
        """End a box that another actor has left running."""
        return await _answer(self._remove(sandbox_id))

    async def stop(self, ticket: int) -> Answer:
        """End a box, or its start, and return once nothing is left of it; safe to repeat."""
        return await _answer(self._stop(ticket))

    async def cause(self, ticket: int) -> Answer:
        """Return in ``cause`` why a box is gone, None while it is not; waits for at most 1.5 s."""
        return await _answer(self._cause(ticket))

    async def look(self, ticket: int) -> Answer:
        """Return in ``look`` what holds a box up, see `envkit.sandbox.agent_client.sandbox.Box.look`."""
        return await _answer(self._look(ticket))

    async def snapshot(self, ticket: int) -> Answer:
        """Keep the files of a box; return the ``name``."""
        return await _answer(self._snapshot(ticket))

    async def snapshot_bytes(self, snapshot: str) -> Answer:
        """Return in ``bytes`` what a snapshot takes of the disk."""
        return await _answer(self._snapshot_bytes(snapshot))

    async def remove_snapshot(self, snapshot: str) -> Answer:
        """Remove a snapshot; one of an earlier actor is gone already."""
        return await _answer(self._remove_snapshot(snapshot))

    async def close(self) -> Answer:
        """End every box, but those that were started to stay, and return once `serve` has ended."""
        self._closing.set()
        await self._closed.wait()
        return self._failure

    async def _start(self, ticket: int, spec: SandboxSpec, orphan_ttl_s: float, snapshot: str | None) -> Answer:
        ledger = spec.ledger or f"ray-{self._run}"  # it stays only in case we end, and nobody has left it running
        seen = replace(spec, detached=True, orphan_ttl_s=orphan_ttl_s, ledger=ledger)
        with anyio.CancelScope() as scope:
            self._starting[ticket] = scope
            try:
                if snapshot is None:
                    box = await self._backend.start(seen)
                else:
                    name, _, run = snapshot.rpartition("@")
                    if run != self._run:
                        raise SandboxRefusedError(f"box {ticket}", f"there is no snapshot {snapshot!r} on this node")
                    box = await self._backend.restore(name, seen)
            finally:
                del self._starting[ticket]
            assert isinstance(box, AgentSandbox)  # those of other kinds cannot stay
            return self._admit(ticket, _Guest(box, orphan_ttl_s, spec.detached, clock.now()))
        raise SandboxStartError(f"box {ticket}", "it was given up")

    async def _attach(self, ticket: int, sandbox_id: str, orphan_ttl_s: float) -> Answer:
        box = await self._backend.attach(sandbox_id)
        return self._admit(ticket, _Guest(box, orphan_ttl_s, stays=True, left_at=clock.now()))

    async def _staying(self, ledger: str) -> Answer:
        return {"ids": await self._backend.staying(ledger)}

    async def _remove(self, sandbox_id: str) -> Answer:
        await self._backend.remove(sandbox_id)
        return {}

    def _admit(self, ticket: int, guest: _Guest) -> Answer:
        self._guests[ticket] = guest
        return {"id": guest.box.id, "work": guest.box.work, "unenforced": list(guest.box.unenforced)}

    async def _stop(self, ticket: int) -> Answer:
        if (scope := self._starting.get(ticket)) is not None:
            scope.cancel()
        if (guest := self._guests.get(ticket)) is not None:
            await guest.box.stop()
            self._guests.pop(ticket, None)
        return {}

    async def _stop_unasked(self, ticket: int) -> None:
        with suppress(SandboxError):  # there is nobody to be told; its own agent ends it a little later
            await self._stop(ticket)

    async def _cause(self, ticket: int) -> Answer:
        with anyio.move_on_after(_CAUSE_S):
            return {"cause": (await self._guest(ticket).box.wait()).plain()}
        return {"cause": None}

    async def _look(self, ticket: int) -> Answer:
        return {"look": await self._guest(ticket).box.look()}

    async def _snapshot(self, ticket: int) -> Answer:
        return {"name": f"{await self._guest(ticket).box.snapshot()}@{self._run}"}

    async def _snapshot_bytes(self, snapshot: str) -> Answer:
        name, _, run = snapshot.rpartition("@")
        return {"bytes": await self._backend.snapshot_bytes(name) if run == self._run else 0}

    async def _remove_snapshot(self, snapshot: str) -> Answer:
        name, _, run = snapshot.rpartition("@")
        if run == self._run:
            await self._backend.remove_snapshot(name)
        return {}

    def _guest(self, ticket: int) -> _Guest:
        if ticket not in self._guests:
            raise SandboxError("its node knows nothing of it")
        return self._guests[ticket]

    async def _end_guests(self) -> None:
        for scope in self._starting.values():
            scope.cancel()
        async with anyio.create_task_group() as tasks:
            for ticket, guest in self._guests.items():
                if not guest.stays:
                    tasks.start_soon(self._stop_unasked, ticket)

    async def _sweep(self, tasks: TaskGroup) -> None:
        """End the boxes that nobody calls."""
        while True:
            await anyio.sleep(_TICK_S)
            for ticket, guest in self._guests.items():
                if not guest.callers and clock.now() - guest.left_at >= guest.orphan_ttl_s:
                    guest.left_at = math.inf
                    tasks.start_soon(self._stop_unasked, ticket)

    async def _accept(self, listener: socket.socket, tasks: TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptors are left, or the caller is gone again
                await anyio.sleep(_FULL_S)
                continue
            tasks.start_soon(self._receive, connected)

    async def _receive(self, connected: socket.socket) -> None:
        stream = SocketStream(connected)
        try:
            tune(connected)
            said = b""
            with anyio.move_on_after(_GREETING_S):
                while b"\n" not in said and len(said) < _GREETING_BYTES and (piece := await stream.receive()):
                    said += piece
            line, _, rest = said.partition(b"\n")
            secret, _, ticket = line.partition(b" ")
            if not hmac.compare_digest(secret, self._secret.encode()) or not ticket.isdigit():
                return
            if (guest := self._guests.get(int(ticket))) is not None:
                await self._relay(stream, guest, rest)
        except (EnvkitError, OSError):
            pass  # the box has just ended, or the caller has; the other one sees it
        finally:
            stream.close()

    async def _relay(self, caller: SocketStream, guest: _Guest, first: bytes) -> None:
        door = SocketStream(await self._backend.dial(guest.box.id))
        guest.callers += 1
        try:
            await door.send(first)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_carry, caller, door, tasks)
                await _carry(door, caller, tasks)
        finally:
            guest.callers -= 1
            guest.left_at = clock.now()
            door.close()


async def _carry(source: SocketStream, target: SocketStream, both: TaskGroup) -> None:
    """Carry bytes until `source` ends, and with it the connection the other way; what was taken is delivered."""
    with suppress(OSError):
        while data := await source.receive():
            await target.send(data)
        with anyio.move_on_after(_LAST_BYTES_S):
            await target.end()
    both.cancel_scope.cancel()


async def _answer(work: Coroutine[Any, Any, Answer]) -> Answer:
    try:
        return await work
    except (EnvkitError, OSError) as error:
        return _problem(error)


def _problem(error: EnvkitError | OSError) -> Answer:
    return {"problem": to_problem(error if isinstance(error, EnvkitError) else SandboxError(str(error)))}


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=_WAITING)
    listener.setblocking(False)
    return listener


def _free_of_bounds() -> None:
    """Take back what a cluster does to its workers and our boxes would inherit: that they yield to every other process,
    and are the first to die when memory runs out.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # of this thread, which also starts the boxes
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
