"""A sandbox on a server, with the methods of a local sandbox; see `envkit.http.client.sandbox_client`."""

from __future__ import annotations

import random
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from envkit import clock
from envkit.errors import (
    CapacityError,
    DeadlineError,
    EnvkitError,
    RateLimitError,
    SandboxLostError,
    SandboxNotFoundError,
    TooLargeError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
from envkit.http.client.connect import connect_bytes, url_connector
from envkit.http.client.connection import SharedWebSocket, connect_once
from envkit.http.client.outages import Outages
from envkit.http.client.streams import RemoteProgram, relay
from envkit.http.client.transfers import HttpTransfers
from envkit.http.protocol import file_messages as files
from envkit.http.protocol import operations as table
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.messages import write
from envkit.http.protocol.operations import KEY_HEADER, Operation, Q, R
from envkit.http.sandboxes.transfers import FolderTransport
from envkit.protocols import Sandbox, Shell
from envkit.types import EXEC_TIMEOUT_S, GRADER_HOME, JSON, Cause, CauseKind, ExecResult, FileUser, SandboxUser

CALL_S = 60.0
"""Timeout of a call that runs no program, in seconds."""

SLACK_S = 60.0
"""Seconds that a client waits beyond a command's own timeout. The server gives up earlier, and sends an error."""

_SHELL_S = 3600.0 + SLACK_S
"""Minimum seconds to wait for a shell command. It is long, because the shell may first run earlier commands."""

_RETRY_S = 60.0
"""Seconds for which a call is retried while the server lacks capacity for it, or a rate limit rejects it."""

_FIRST_DELAY_S, _MAX_DELAY_S = 0.02, 1.0
"""Backoff: seconds before the first of these retries, and the maximum before a later one."""

_FILE_S = 180.0
_TREE_S = 3600.0
_STOP_S = 75.0
_CANCEL_S = 40.0
_FRAME_BYTES = 512 << 10
_PIECE_BYTES = 1 << 20
_PATH_MAX = 4096
"""Maximum bytes of a call over the WebSocket; larger calls use HTTP. Servers accept frames up to twice this size."""

_FRAME_OUTPUT_BYTES = 4 << 20
"""Maximum bytes of an answer over the WebSocket; calls whose answer may be larger use HTTP."""

T = TypeVar("T")
P = TypeVar("P", wire.ExecFrame, wire.ShellFrame)
K = TypeVar("K", wire.ExecFrame, wire.ShellFrame, files.WriteFrame, wire.SnapshotFrame)


class SandboxTransport:
    """The connections of a client to a server: one WebSocket that all calls share, and HTTP for large transfers.

    The arguments are those of `envkit.http.client.sandbox_client.SandboxClient`.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        ca: Path | str | None,
        folder_transport: FolderTransport | None,
        outages: Outages,
    ) -> None:
        self.address = url.rstrip("/")
        self.websocket = SharedWebSocket(self.address, url_connector(self.address, CALL_S, token=token, ca=ca))
        self.http = HttpTransfers(self.address, token, ca)
        self.tasks: TaskGroup | None = None
        """Runs the tasks that copy the bytes of open connections; None while the client is not connected."""
        self._token = token
        self._ca = ca
        self._folder_transport = folder_transport
        self._outages = outages
        self._rng = random.Random()

    @property
    def folder_transport(self) -> FolderTransport:
        """Object that packs and unpacks folders for transfers.

        Raises:
            UnsupportedError: The client was created without `folder_transport`.
        """
        if self._folder_transport is None:
            raise UnsupportedError("cannot copy folders: this client was created without a folder transport; pass one")
        return self._folder_transport

    async def call(self, operation: Operation[Q, R], request: Q, timeout_s: float = CALL_S) -> R:
        """Make a call over the WebSocket. Raises the error that the server answers."""
        return await self._outages.call(partial(self.websocket.call, operation, request, timeout_s))

    async def call_http(
        self, operation: Operation[Q, Any], request: Q, timeout_s: float, content: bytes | None = None
    ) -> bytes:
        """Make a call over HTTP, and return the body of the answer. Retry once if the connection breaks.

        `content` is the body of the HTTP request; None sends those fields of `request` that belong in the body as JSON.
        """
        key, target = getattr(request, "key", None), operation.target(request)
        headers = {"Content-Type": operation.takes, **({} if key is None else {KEY_HEADER: key})}
        body = operation.content(request) if content is None else content

        async def send() -> bytes:
            async with self.http.exchange(operation.verb, target, timeout_s, body, headers) as response:
                return await response.aread()

        async def send_twice() -> bytes:
            try:
                return await send()
            except UnreachableError:
                return await send()

        return await self._outages.call(send_twice)

    async def open_stream(self, operation: Operation[Q, Any], request: Q) -> ClientConnection:
        """Open the byte stream of an operation; see `envkit.http.sandboxes.streams`. The caller closes it."""
        path = operation.target(request)
        connector = url_connector(self.address, CALL_S, token=self._token, ca=self._ca, path=path)
        return await self._outages.call(partial(connect_once, connector, self.address))

    async def open_bytes(self, operation: Operation[Q, Any], request: Q) -> socket.socket:
        """Open the byte stream of an operation of a node without TLS; see `envkit.http.sandboxes.byte_relay`.

        Raises:
            UnreachableError: The node does not answer, or nothing listens in the sandbox.
        """
        return await connect_bytes(self.address, operation.target(request), CALL_S, token=self._token)

    async def with_retries(self, call: Callable[[], Awaitable[T]], retry_s: float = _RETRY_S) -> T:
        """Make a call. Repeat it for up to `retry_s` seconds while it exceeds the server's capacity or rate limit.

        A rejected call has not started, so repeating it is safe.
        """
        until, delay_s = clock.now() + retry_s, _FIRST_DELAY_S
        while True:
            try:
                return await call()
            except (CapacityError, RateLimitError) as error:
                wait_s = error.wait_s if isinstance(error, RateLimitError) else 0.0
                if clock.now() + max(wait_s, delay_s) > until:
                    raise
                await anyio.sleep(max(wait_s, delay_s * self._rng.uniform(0.5, 1.0)))  # jitter
                delay_s = min(2 * delay_s, _MAX_DELAY_S)


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
        """Copy a file or folder into the sandbox; see `envkit.protocols.Sandbox.upload`.

        Raises:
            UnsupportedError: The client was created without `folder_transport`.
        """
        if not target.rstrip("/"):
            raise UsageError(f"target must be the path of a file or folder below the root, got {target!r}")
        with self._unknown_is_lost():
            async with aclosing(self._transport.folder_transport.packed(source, "tree")) as pieces:
                url = table.UPLOAD_TREE.target(files.UploadTree(self._id, target, user))
                async with self._transport.http.exchange("PUT", url, _TREE_S, pieces):
                    pass

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """Copy a file or folder out of the sandbox; see `envkit.protocols.Sandbox.download`.

        Raises:
            UsageError: `target` exists already, or the folder that should contain it is missing.
            UnsupportedError: The client was created without `folder_transport`.
        """
        folder_transport = self._transport.folder_transport
        url = table.DOWNLOAD_TREE.target(files.DownloadTree(self._id, source, max_bytes, user))
        with self._unknown_is_lost():
            async with self._transport.http.exchange("GET", url, _TREE_S) as response:
                await folder_transport.unpacked(response.aiter_raw(_PIECE_BYTES), target, max_bytes=max_bytes)

    async def connect(self, address: str | int) -> socket.socket:
        """Connect to a socket or a port in the sandbox; see `envkit.protocols.Sandbox.connect`.

        If nothing listens at `address`, no error is raised: reading from the returned socket yields the end of stream.
        """
        connection = await self._transport.open_stream(table.CONNECT, wire.ConnectQuery(self._id, str(address)))
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        assert self._transport.tasks is not None
        self._transport.tasks.start_soon(relay, connection, theirs)
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
        async with await self._transport.open_stream(table.PROGRAM, wire.ProgramQuery(self._id)) as connection:
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


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
