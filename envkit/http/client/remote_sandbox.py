"""A sandbox on a server, with the methods of a local sandbox; see `envkit.http.client.sandbox_client`."""

from __future__ import annotations

import random
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

import anyio
import msgspec
from anyio.abc import TaskGroup
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from envkit import clock
from envkit.errors import (
    CapacityError,
    DeadlineError,
    EnvkitError,
    RateLimitError,
    RequestError,
    SandboxLostError,
    SandboxNotFoundError,
    TooLargeError,
    UnsupportedError,
    UsageError,
)
from envkit.http.client.connect import url_connector
from envkit.http.client.connection import SharedWebSocket, connect_once
from envkit.http.client.streams import RemoteProgram, relay
from envkit.http.client.transfers import HttpTransfers
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.bytes_encoding import encode_argument
from envkit.http.protocol.messages import DoneReply, write
from envkit.http.sandboxes.transfers import FolderTransport
from envkit.types import EXEC_TIMEOUT_S, GRADER_HOME, Cause, CauseKind, ExecResult, FileUser, SandboxUser

CALL_S = 60.0
"""Timeout of a call that runs no program, in seconds."""

SLACK_S = 60.0
"""Seconds that a client waits beyond a command's own timeout; a server waits less."""

_SHELL_S = 3600.0 + SLACK_S
"""Timeout of a shell command, which waits for earlier ones."""

_RETRY_S = 60.0
"""Seconds for which a call is retried while the server has no memory for it."""

_FILE_S = 180.0
_TREE_S = 3600.0
_STOP_S = 75.0
_CANCEL_S = 40.0
_FRAME_BYTES = 512 << 10
"""Limit on a call sent over the WebSocket; the server rejects frames above twice that size."""

_FRAME_OUTPUT_BYTES = 4 << 20
"""Limit on an answer sent over the WebSocket."""

T = TypeVar("T")


class SandboxTransport:
    """The connections of a client to a server: one WebSocket that all calls share, and HTTP for large transfers.

    Args:
        url: Address of the server.
        token: Token for the server; None sends no token.
        ca: PEM file with the certificates to trust; None: those of the system.
        folder_transport: Packs and unpacks folders; None: this client cannot copy folders.
    """

    def __init__(
        self, url: str, token: str | None, ca: Path | str | None, folder_transport: FolderTransport | None
    ) -> None:
        self.address = url.rstrip("/")
        self.websocket = SharedWebSocket(self.address, url_connector(self.address, CALL_S, token=token, ca=ca))
        self.http = HttpTransfers(self.address, token, ca)
        self.tasks: TaskGroup | None = None
        """Runs the relays of connections; None while the client is not connected."""
        self._token = token
        self._ca = ca
        self._folder_transport = folder_transport
        self._rng = random.Random()

    @property
    def folder_transport(self) -> FolderTransport:
        """Object that packs and unpacks folders for transfers.

        Raises:
            UnsupportedError: The client was created without `folder_transport`.
        """
        if self._folder_transport is None:
            raise UnsupportedError("this client cannot copy folders: it was created without a folder transport")
        return self._folder_transport

    async def call(self, method: str, body: msgspec.Struct, reply: type[T], timeout_s: float = CALL_S) -> T:
        """Call a sandbox method over the WebSocket. Raises the error that the server answers."""
        return self.decode(method, await self.websocket.call(f"sandbox.{method}", body, timeout_s), reply)

    async def open_stream(self, path: str) -> ClientConnection:
        """Open the byte stream at `path`; see `envkit.http.sandboxes.streams`. The caller closes it."""
        connector = url_connector(self.address, CALL_S, token=self._token, ca=self._ca, path=path)
        return await connect_once(connector, self.address)

    async def with_retries(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call for up to `_RETRY_S` seconds while the server rejects it for lack of capacity.

        A rejected call has not started, so repeating it is safe.
        """
        until = clock.now() + _RETRY_S
        while True:
            try:
                return await call()
            except (CapacityError, RateLimitError) as error:
                wait_s = error.wait_s if isinstance(error, RateLimitError) else 0.0
                if clock.now() + wait_s > until:
                    raise
                await anyio.sleep(max(wait_s, self._rng.uniform(0.5, 1.0)))  # jitter

    async def stop(self, id: str) -> None:
        """Stop a sandbox and wait until it is removed, 75 s at most. The call is safe to repeat.

        A cancellation of the calling task does not interrupt the call.
        """
        with anyio.CancelScope(shield=True):
            await self.call("stop", wire.SandboxFrame(id), DoneReply, _STOP_S)

    def decode(self, method: str, content: bytes | msgspec.Raw, reply: type[T]) -> T:
        """Decode the answer to a call.

        Raises:
            RequestError: The answer is not a valid `reply`.
        """
        try:
            return msgspec.json.decode(content, type=reply)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{self.address} sent an invalid answer to {method!r}: {error}") from None


class RemoteSandbox:
    """A sandbox on a server, returned by `SandboxClient`; implements `envkit.protocols.Sandbox`."""

    def __init__(self, id: str, transport: SandboxTransport) -> None:
        self._id = id
        self._transport = transport
        self._url = f"{wire.BEFORE_ID}{id}"

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
        """Run a program to its end; see `envkit.protocols.Sandbox.exec`."""
        settings = dict(env or {})
        fields = {
            "argv": tuple(map(encode_argument, argv)),
            "timeout_s": timeout_s,
            "env": settings,
            "cwd": cwd,
            "stdin": stdin,
            "user": user,
            "max_output_bytes": max_output_bytes,
        }
        size = len(stdin) + sum(map(len, argv)) + sum(len(name) + len(value) for name, value in settings.items())
        key = uuid.uuid4().hex
        if size > _FRAME_BYTES or max_output_bytes > _FRAME_OUTPUT_BYTES:
            body = wire.ExecBody(**fields)  # type: ignore[arg-type]
            return await self._run_by_http("exec", key, body, timeout_s + SLACK_S)
        frame = wire.ExecFrame(**fields, sandbox_id=self._id, key=key)  # type: ignore[arg-type]
        return (await self._keyed("exec", key, frame, wire.ExecReply, timeout_s + SLACK_S)).result()

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> RemoteShell:
        """Return the persistent shell `name`. The shell process starts with its first command."""
        return RemoteShell(self, name, user)

    async def run_in_shell(
        self, name: str, user: SandboxUser, command: str, timeout_s: float, max_output_bytes: int
    ) -> ExecResult:
        """Run a command in a persistent shell; see `envkit.protocols.Shell.run`."""
        key = uuid.uuid4().hex
        bound_s = max(_SHELL_S, timeout_s + SLACK_S)
        if len(command) > _FRAME_BYTES or max_output_bytes > _FRAME_OUTPUT_BYTES:
            body = wire.ShellBody(command, timeout_s, user, max_output_bytes)
            return await self._run_by_http(f"shells/{wire.read_sandbox_id(name)}", key, body, bound_s)
        frame = wire.ShellFrame(
            command, timeout_s, user, max_output_bytes, sandbox_id=self._id, shell=wire.read_sandbox_id(name), key=key
        )
        return (await self._keyed("shell", key, frame, wire.ExecReply, bound_s)).result()

    async def close_shell(self, name: str, user: SandboxUser) -> None:
        """Close a shell; see `envkit.protocols.Shell.close`."""
        await self._call("close_shell", wire.CloseShellFrame(self._id, wire.read_sandbox_id(name), user), DoneReply)

    @property
    def grader_home(self) -> str:
        """Path of the graders' private folder in isolated sandboxes."""
        return GRADER_HOME

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        """Return the content of a file; see `envkit.protocols.Sandbox.read`."""
        if _is_text(path):
            limit = min(max_bytes, wire.MAX_FRAME_FILE_BYTES)
            try:
                return (await self._call("read", wire.ReadFrame(self._id, path, limit, user), wire.FileReply)).content
            except TooLargeError:
                if limit == max_bytes:
                    raise
        target = f"{self._url}/files?{_query(path=path, max_bytes=str(max_bytes), user=user)}"
        with self._unknown_is_lost():
            read = partial(self._transport.http.request, "GET", target, b"", timeout_s=_FILE_S)
            return await self._transport.with_retries(read)

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        """Write a file atomically: if writing fails, the file is unchanged. See `envkit.protocols.Sandbox.write`."""
        key = uuid.uuid4().hex
        if len(content) <= _FRAME_BYTES and _is_text(path):
            frame = wire.WriteFrame(self._id, path, content, mode, key, user)
            await self._keyed("write", key, frame, DoneReply, _FILE_S)
            return
        query = {} if mode is None else {"mode": f"{mode:o}"}
        target = f"{self._url}/files?{_query(path=path, user=user, **query)}"
        headers = {"Idempotency-Key": key}
        with self._unknown_is_lost():
            async with self._cancelled_with_us(key):
                send = partial(self._transport.http.request, "PUT", target, content, timeout_s=_FILE_S, headers=headers)
                await self._transport.with_retries(send)

    async def upload(self, source: Path, target: str, *, user: FileUser = "agent") -> None:
        """Copy a file or folder into the sandbox; see `envkit.protocols.Sandbox.upload`.

        Raises:
            UnsupportedError: The client was created without `folder_transport`.
        """
        if not target.rstrip("/"):
            raise UsageError(f"{target!r} is not a path of a file or folder")
        with self._unknown_is_lost():
            async with aclosing(self._transport.folder_transport.packed(source, "tree")) as pieces:
                url = f"{self._url}/tree?{_query(path=target, user=user)}"
                await self._transport.http.send("PUT", url, pieces, timeout_s=_TREE_S)

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """Copy a file or folder out of the sandbox; see `envkit.protocols.Sandbox.download`.

        Raises:
            UsageError: `target` exists already, or the folder that should contain it is missing.
            UnsupportedError: The client was created without `folder_transport`.
        """
        folder_transport = self._transport.folder_transport
        url = f"{self._url}/tree?{_query(path=source, max_bytes=str(max_bytes), user=user)}"
        with self._unknown_is_lost():
            async with aclosing(self._transport.http.pieces(url, timeout_s=_TREE_S)) as pieces:
                await folder_transport.unpacked(pieces, target, max_bytes=max_bytes)

    async def connect(self, address: str | int) -> socket.socket:
        """Raise `UnsupportedError`, because a client cannot connect to sockets inside a remote sandbox.

        If the connection in the sandbox fails, the returned socket is at its end.
        """
        path = f"{self._url}/connect?{_query(to=str(address))}"
        connection = await self._transport.open_stream(path)
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
        """Run a program with streamed input and output; see `envkit.protocols.InteractiveSandbox.program`."""
        arguments = tuple(map(encode_argument, argv))
        body = wire.ProgramBody(arguments, timeout_s, dict(env or {}), cwd, user, terminal)
        async with await self._transport.open_stream(f"{self._url}/program") as connection:
            with suppress(ConnectionClosed):  # the server has refused the program; `receive` raises the reason
                await connection.send(write(body).decode())
            yield RemoteProgram(connection, self._transport.address)

    async def probe(self, timeout_s: float) -> float:
        """Probe the sandbox, and return the seconds until it answered, including the network time to the server."""
        began = clock.precise()
        with anyio.move_on_after(timeout_s):
            await self._call("probe", wire.ProbeFrame(self._id, timeout_s), wire.ProbeReply)
            return clock.precise() - began
        raise DeadlineError(f"sandbox {self._id} did not answer within {timeout_s:g} s")

    async def snapshot(self) -> str:
        """Take a snapshot of the sandbox's files, and return its name, which `SandboxClient.create` accepts.

        Raises:
            UnsupportedError: The server's sandbox backend does not support snapshots.
        """
        key = uuid.uuid4().hex
        frame = wire.SnapshotFrame(self._id, key)
        return (await self._keyed("snapshot", key, frame, wire.SnapshotReply, _SHELL_S)).snapshot

    async def log(self) -> str:
        """Return the last 64 KiB of the standard error of the sandbox's command.

        Raises:
            UnsupportedError: The server's sandbox backend does not store standard error.
        """
        return (await self._call("log", wire.SandboxFrame(self._id), wire.LogReply)).log

    async def stats(self) -> Mapping[str, object]:
        """Return the resource usage of the sandbox.

        Raises:
            UnsupportedError: The server's sandbox backend does not report resource usage.
        """
        return (await self._call("stats", wire.SandboxFrame(self._id), wire.StatsReply)).stats

    async def wait(self) -> Cause:
        """Wait until the sandbox has ended; return the cause."""
        while True:
            try:
                cause = (await self._call("wait", wire.SandboxFrame(self._id), wire.WaitReply)).cause
            except SandboxLostError as error:
                return error.cause
            if cause is not None:
                return cause

    async def stop(self) -> None:
        """Stop the sandbox and all processes in it. The call is safe to repeat."""
        await self._transport.stop(self._id)

    async def _call(self, method: str, body: msgspec.Struct, reply: type[T], timeout_s: float = CALL_S) -> T:
        with self._unknown_is_lost():
            return await self._transport.call(method, body, reply, timeout_s)

    async def _keyed(self, method: str, key: str, body: msgspec.Struct, reply: type[T], timeout_s: float) -> T:
        async with self._cancelled_with_us(key):
            return await self._transport.with_retries(partial(self._call, method, body, reply, timeout_s))

    async def _run_by_http(self, path: str, key: str, body: msgspec.Struct, timeout_s: float) -> ExecResult:
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        with self._unknown_is_lost():
            async with self._cancelled_with_us(key):
                url = f"{self._url}/{path}"
                send = partial(self._transport.http.request, "POST", url, write(body), headers=headers)
                answer = await self._transport.with_retries(partial(send, timeout_s=timeout_s))
        return self._transport.decode(path, answer, wire.ExecReply).result()

    @asynccontextmanager
    async def _cancelled_with_us(self, key: str) -> AsyncIterator[None]:
        """If the block is cancelled, cancel the call with the idempotency key `key` on the server as well."""
        try:
            yield
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True), suppress(EnvkitError):
                await self._transport.call("cancel", wire.CancelFrame(self._id, key), DoneReply, _CANCEL_S)
            raise

    @contextmanager
    def _unknown_is_lost(self) -> Iterator[None]:
        """Raise `SandboxLostError` if the server no longer knows the sandbox."""
        try:
            yield
        except SandboxNotFoundError as error:
            raise SandboxLostError(self._id, Cause(CauseKind.BACKEND_LOST, str(error))) from None


class RemoteShell:
    """A persistent shell in a remote sandbox; implements `envkit.protocols.Shell`."""

    def __init__(self, sandbox: RemoteSandbox, name: str, user: SandboxUser) -> None:
        self._sandbox = sandbox
        self._name = name
        self._user: SandboxUser = user

    async def run(
        self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        """Run `command`; see `envkit.protocols.Shell.run`."""
        return await self._sandbox.run_in_shell(self._name, self._user, command, timeout_s, max_output_bytes)

    async def close(self) -> None:
        """Close the shell and kill all processes that it started. The call is safe to repeat."""
        await self._sandbox.close_shell(self._name, self._user)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _query(**values: str) -> str:
    return urlencode(values, quote_via=quote, errors="surrogateescape")
