"""A sandbox on a server, with the methods of a local sandbox; see `envkit.http.client.sandbox_client`."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from envkit import clock
from envkit.errors import (
    DeadlineError,
    EnvkitError,
    SandboxLostError,
    SandboxNotFoundError,
    TooLargeError,
    UnreachableError,
    UsageError,
    from_problem,
)
from envkit.http.client.transport import CALL_S, SandboxTransport
from envkit.http.protocol import file_messages as files
from envkit.http.protocol import operations as table
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.messages import write
from envkit.http.protocol.operations import Operation, Q, R
from envkit.protocols import Program, Sandbox, Shell
from envkit.types import EXEC_TIMEOUT_S, GRADER_HOME, JSON, Cause, CauseKind, ExecResult, FileUser, SandboxUser

SLACK_S = 60.0
"""Seconds that a client waits beyond a command's own timeout. The server gives up earlier, and sends an error."""

_SHELL_S = 3600.0 + SLACK_S
"""Minimum seconds to wait for a shell command. It is long, because the shell may first run earlier commands."""

_FILE_S = 180.0
_TREE_S = 3600.0
_STOP_S = 75.0
_CANCEL_S = 40.0
_PATH_MAX = 4096
_PIECE_BYTES = 1 << 20
_FRAME_BYTES = 512 << 10
"""Maximum bytes of a call over the WebSocket; larger calls use HTTP. Servers accept frames up to twice this size."""

_FRAME_OUTPUT_BYTES = 4 << 20
"""Maximum bytes of an answer over the WebSocket; calls whose answer may be larger use HTTP."""

_END = msgspec.json.Decoder(wire.StreamEnd)
_STREAMS = {1: "out", 2: "err"}
_STREAM_BYTES = 1 << 16
_CLOSE_S = 2.0

T = TypeVar("T")
P = TypeVar("P", wire.ExecFrame, wire.ShellFrame)
K = TypeVar("K", wire.ExecFrame, wire.ShellFrame, files.WriteFrame, wire.SnapshotFrame)


class RemoteSandbox(Sandbox):
    """A sandbox on a server, returned by `SandboxClient`; implements `envkit.protocols.Sandbox`."""

    def __init__(self, id: str, transport: SandboxTransport) -> None:
        self._id = id
        self._transport = transport

    @property
    def id(self) -> str:
        return self._id

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = EXEC_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        user: SandboxUser = "agent",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        frame = wire.ExecFrame(
            tuple(map(wire.encode_argument, argv)),
            timeout_s,
            dict(env or {}),
            cwd,
            stdin,
            user,
            max_output_bytes,
            sandbox_id=self._id,
            key=uuid.uuid4().hex,
        )
        size = len(stdin) + sum(map(len, argv)) + sum(len(name) + len(value) for name, value in frame.env.items())
        return await self.run(table.EXEC, frame, size, timeout_s + SLACK_S)

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> RemoteShell:
        return RemoteShell(self, name, user)

    @property
    def grader_home(self) -> str:
        return GRADER_HOME

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        if _is_text(path):
            limit = min(max_bytes, files.MAX_FRAME_FILE_BYTES)
            try:
                return (await self.call(table.READ, files.ReadFrame(self._id, path, limit, user))).content
            except TooLargeError:
                if limit == max_bytes or len(path) > _PATH_MAX:  # the path may be what is too large
                    raise
        query = files.ReadFile(self._id, path, max_bytes, user)
        with self._unknown_is_lost():
            read = partial(self._transport.call_http, table.READ_FILE, query, _FILE_S, b"")
            return await self._transport.with_retries(read)

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        key = uuid.uuid4().hex
        if len(content) <= _FRAME_BYTES and _is_text(path):
            await self._keyed(table.WRITE, files.WriteFrame(self._id, path, content, mode, key, user), _FILE_S)
            return
        query = files.WriteFile(self._id, path, "" if mode is None else f"{mode:o}", user, key)
        await self._with_key(key, partial(self._transport.call_http, table.WRITE_FILE, query, _FILE_S, content))

    async def upload(self, source: Path, target: str, *, user: FileUser = "agent") -> None:
        """See `envkit.protocols.Sandbox.upload`. Raises `UnsupportedError` without a `folder_transport`."""
        if not target.rstrip("/"):
            raise UsageError(f"target must be the path of a file or folder below the root, got {target!r}")
        with self._unknown_is_lost():
            async with aclosing(self._transport.folder_transport.packed(source, "tree")) as pieces:
                url = table.UPLOAD_TREE.target(files.UploadTree(self._id, target, user))
                async with self._transport.exchange("PUT", url, _TREE_S, pieces):
                    pass

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """See `envkit.protocols.Sandbox.download`. Raises `UnsupportedError` without a `folder_transport`."""
        folder_transport = self._transport.folder_transport
        url = table.DOWNLOAD_TREE.target(files.DownloadTree(self._id, source, max_bytes, user))
        with self._unknown_is_lost():
            async with self._transport.exchange("GET", url, _TREE_S) as response:
                await folder_transport.unpacked(response.aiter_raw(_PIECE_BYTES), target, max_bytes=max_bytes)

    async def connect(self, address: str | int) -> socket.socket:
        """See `envkit.protocols.Sandbox.connect`.

        If nothing listens at `address`, no error is raised: reading from the returned socket yields the end of stream.
        """
        connection = await self._transport.open_stream(table.CONNECT, wire.ConnectQuery(self._id, str(address)))
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        assert self._transport.tasks is not None
        self._transport.tasks.start_soon(_relay, connection, theirs)
        return ours

    @asynccontextmanager
    async def program(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: SandboxUser = "agent",
        terminal: tuple[int, int] | None = None,
    ) -> AsyncIterator[RemoteProgram]:
        arguments = tuple(map(wire.encode_argument, argv))
        body = wire.ProgramBody(arguments, timeout_s, dict(env or {}), cwd, user, terminal)
        async with await self._transport.open_stream(table.PROGRAM, wire.SandboxFrame(self._id)) as connection:
            with suppress(ConnectionClosed):  # the server has refused the program; `receive` raises the reason
                await connection.send(write(body).decode())
            yield self._program(connection)

    def _program(self, connection: ClientConnection) -> RemoteProgram:
        return RemoteProgram(connection, self._transport.address)

    async def probe(self, timeout_s: float) -> float:
        """Probe the sandbox, and return the seconds until it answered, including the network time to the server."""
        began = clock.precise()
        with anyio.move_on_after(timeout_s):
            await self.call(table.PROBE, wire.ProbeFrame(self._id, timeout_s))
            return clock.precise() - began
        raise DeadlineError(f"sandbox {self._id} did not answer within {timeout_s:g} s")

    async def snapshot(self) -> str:
        frame = wire.SnapshotFrame(self._id, uuid.uuid4().hex)
        return (await self._keyed(table.SNAPSHOT, frame, _SHELL_S)).snapshot

    async def log(self) -> str:
        return (await self.call(table.LOG, wire.SandboxFrame(self._id))).log

    async def stats(self) -> Mapping[str, JSON]:
        return (await self.call(table.STATS, wire.SandboxFrame(self._id))).stats

    async def wait(self) -> Cause:
        while True:
            try:
                cause = (await self.call(table.WAIT, wire.SandboxFrame(self._id))).cause
            except SandboxLostError as error:
                return error.cause
            if cause is not None:
                return cause

    async def stop(self) -> None:
        """Stop the sandbox and all processes in it, and wait at most 75 s until it is removed. Safe to repeat.

        A cancellation of the calling task does not interrupt the call.
        """
        with anyio.CancelScope(shield=True):
            await self._transport.websocket.call(table.STOP, wire.SandboxFrame(self._id), _STOP_S)

    async def call(self, operation: Operation[Q, R], request: Q, timeout_s: float = CALL_S) -> R:
        """Make a call. Raises the server's error, or `SandboxLostError` if the server does not know the sandbox."""
        with self._unknown_is_lost():
            return await self._transport.call(operation, request, timeout_s)

    async def run(self, operation: Operation[P, wire.ExecReply], request: P, size: int, timeout_s: float) -> ExecResult:
        """Run a program or command. Use HTTP if the request (about `size` bytes) or its result may be large."""
        if size <= _FRAME_BYTES and request.max_output_bytes <= _FRAME_OUTPUT_BYTES:
            return (await self._keyed(operation, request, timeout_s)).result()
        assert request.key is not None
        call = partial(self._transport.call_http, operation, request, timeout_s)
        return self._transport.websocket.decode(operation, await self._with_key(request.key, call)).result()

    async def _keyed(self, operation: Operation[K, R], request: K, timeout_s: float) -> R:
        assert request.key is not None
        return await self._with_key(request.key, partial(self._transport.call, operation, request, timeout_s))

    async def _with_key(self, key: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call with an idempotency key, with retries. If this task is cancelled, cancel it on the server too."""
        with self._unknown_is_lost():
            try:
                return await self._transport.with_retries(call)
            except anyio.get_cancelled_exc_class():
                with anyio.CancelScope(shield=True), suppress(EnvkitError):
                    await self._transport.websocket.call(table.CANCEL, wire.CancelFrame(self._id, key), _CANCEL_S)
                raise

    @contextmanager
    def _unknown_is_lost(self) -> Iterator[None]:
        """Convert a `SandboxNotFoundError` of the block to a `SandboxLostError`: the server has lost the sandbox."""
        try:
            yield
        except SandboxNotFoundError as error:
            raise SandboxLostError(self._id, Cause(CauseKind.BACKEND_LOST, str(error))) from None


class RemoteShell(Shell):
    """A persistent shell in a remote sandbox; implements `envkit.protocols.Shell`."""

    def __init__(self, sandbox: RemoteSandbox, name: str, user: SandboxUser) -> None:
        self._sandbox = sandbox
        self._name = name
        self._user: SandboxUser = user

    async def run(
        self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        key = uuid.uuid4().hex
        frame = wire.ShellFrame(
            command, timeout_s, self._user, max_output_bytes, sandbox_id=self._sandbox.id, name=self._name, key=key
        )
        return await self._sandbox.run(table.SHELL, frame, len(command), max(_SHELL_S, timeout_s + SLACK_S))

    async def close(self) -> None:
        await self._sandbox.call(table.CLOSE_SHELL, wire.CloseShellFrame(self._sandbox.id, self._name, self._user))


class RemoteProgram(Program):
    """A running program in a sandbox of a server; implements `envkit.protocols.Program`."""

    def __init__(self, connection: ClientConnection, address: str) -> None:
        self._connection = connection
        self._address = address
        self._end: wire.StreamEnd | None = None

    async def receive(self) -> tuple[str, bytes] | None:
        if self._end is not None:
            return None
        try:
            message = await self._connection.recv()
        except ConnectionClosed:
            raise UnreachableError(f"{self._address} closed the connection while a program was running") from None
        if isinstance(message, bytes):
            return _STREAMS.get(message[0], "out"), message[1:]
        self._end = _end_of(message)
        return None

    async def send(self, content: bytes) -> None:
        with suppress(ConnectionClosed):
            for start in range(0, len(content), _STREAM_BYTES):
                await self._connection.send(content[start : start + _STREAM_BYTES])

    async def send_eof(self) -> None:
        with suppress(ConnectionClosed):
            await self._connection.send(write(wire.ProgramInput(eof=True)).decode())

    async def resize(self, rows: int, columns: int) -> None:
        with suppress(ConnectionClosed):
            await self._connection.send(write(wire.ProgramInput(rows=rows, columns=columns)).decode())

    async def result(self) -> ExecResult:
        if self._end is None or self._end.result is None:
            raise RuntimeError("the program has not ended; call receive until it returns None")
        return self._end.result.result()


def _end_of(message: str) -> wire.StreamEnd:
    """Decode the last message of a stream. If the message contains an error, raise that error."""
    end = _END.decode(message)
    if end.error is not None:
        error: EnvkitError = from_problem(msgspec.to_builtins(end.error))
        raise error
    return end


async def _relay(connection: ClientConnection, stream: socket.socket) -> None:
    """Copy bytes in both directions between `connection` and `stream` until `connection` ends. Then close both."""
    loop = asyncio.get_running_loop()
    stream.setblocking(False)

    async def send_input() -> None:
        with suppress(ConnectionClosed, OSError):
            while piece := await loop.sock_recv(stream, _STREAM_BYTES):
                await connection.send(piece)
            await connection.send(b"")

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_input)
            with suppress(ConnectionClosed, OSError):
                while isinstance(message := await connection.recv(), bytes):
                    await loop.sock_sendall(stream, message)
            tasks.cancel_scope.cancel()
    finally:
        stream.close()
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await connection.close()


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
