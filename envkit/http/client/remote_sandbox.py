"""A sandbox of a server, as if it were here; see `envkit.http.client.sandbox_client`."""

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
from envkit.http.client.connect import dial_url
from envkit.http.client.connection import SharedWebSocket
from envkit.http.client.transfers import HttpTransfers
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.bytes_encoding import encode_argument
from envkit.http.protocol.messages import DoneReply, write
from envkit.http.sandboxes.transfers import FolderTransport
from envkit.types import EXEC_TIMEOUT_S, GRADER_HOME, Cause, CauseKind, ExecResult, FileUser, SandboxUser

CALL_S = 60.0
"""Seconds that a call may take which runs nothing."""

SLACK_S = 60.0
"""Seconds beyond its own time that a call may take; the server's own slack is shorter."""

_SHELL_S = 3600.0 + SLACK_S
"""A command of a shell waits for those before it."""

_PATIENCE_S = 60.0
"""Seconds for which a call is asked for again that the server has no memory for."""

_FILE_S = 180.0
_TREE_S = 3600.0
_STOP_S = 75.0
_CANCEL_S = 40.0
_FRAME_BYTES = 512 << 10
"""What a call may hold to go over the socket; the server refuses frames of twice that size."""

_FRAME_OUTPUT_BYTES = 4 << 20
"""What an answer may hold to come over the socket."""

T = TypeVar("T")


class SandboxTransport:
    """The ways to a server: a socket that all calls share, and HTTP for what is too large for it.

    Args:
        url: Where it is.
        token: Shown to it, where it wants one.
        ca: PEM file of the certificates that it is trusted by; None for the system's.
        trees: Packs and unpacks folders; None: they cannot be copied.
    """

    def __init__(self, url: str, token: str | None, ca: Path | str | None, trees: FolderTransport | None) -> None:
        self.address = url.rstrip("/")
        self.channel = SharedWebSocket(self.address, dial_url(self.address, CALL_S, token=token, ca=ca))
        self.bulk = HttpTransfers(self.address, token, ca)
        self._trees = trees
        self._rng = random.Random()

    @property
    def trees(self) -> FolderTransport:
        """Packs and unpacks folders.

        Raises:
            UnsupportedError: Nothing does.
        """
        if self._trees is None:
            raise UnsupportedError("this client was made without a way to pack folders (trees)")
        return self._trees

    async def call(self, method: str, body: msgspec.Struct, reply: type[T], timeout_s: float = CALL_S) -> T:
        """Make a call about sandboxes over the socket. Raises whatever the server answers."""
        return self.decoded(method, await self.channel.call(f"sandbox.{method}", body, timeout_s), reply)

    async def patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask again for a while where the server holds too much; it has begun nothing then."""
        until = clock.now() + _PATIENCE_S
        while True:
            try:
                return await ask()
            except (CapacityError, RateLimitError) as error:
                wait_s = error.wait_s if isinstance(error, RateLimitError) else 0.0
                if clock.now() + wait_s > until:
                    raise
                await anyio.sleep(max(wait_s, self._rng.uniform(0.5, 1.0)))  # not all clients in step

    async def stop(self, id: str) -> None:
        """End a sandbox and wait until nothing is left of it; safe to repeat, not cancelled, bounded (75 s)."""
        with anyio.CancelScope(shield=True):
            await self.call("stop", wire.SandboxFrame(id), DoneReply, _STOP_S)

    def decoded(self, method: str, content: bytes | msgspec.Raw, reply: type[T]) -> T:
        """Return an answer.

        Raises:
            RequestError: It is none.
        """
        try:
            return msgspec.json.decode(content, type=reply)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{self.address} answers {method!r} in a way that cannot be read: {error}") from None


class RemoteSandbox:
    """A sandbox of a server; satisfies `envkit.protocols.Sandbox`. Made by `SandboxClient`."""

    def __init__(self, id: str, line: SandboxTransport) -> None:
        self._id = id
        self._line = line
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
            order = wire.ExecBody(**fields)  # type: ignore[arg-type]
            return await self._run_by_http("exec", key, order, timeout_s + SLACK_S)
        frame = wire.ExecFrame(**fields, sandbox_id=self._id, key=key)  # type: ignore[arg-type]
        return (await self._keyed("exec", key, frame, wire.ExecReply, timeout_s + SLACK_S)).result()

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> RemoteShell:
        """Return the shell `name`, which starts with its first command."""
        return RemoteShell(self, name, user)

    async def run_in_shell(
        self, name: str, user: SandboxUser, command: str, timeout_s: float, max_output_bytes: int
    ) -> ExecResult:
        """Run a command; see `envkit.protocols.Shell.run`."""
        key = uuid.uuid4().hex
        bound_s = max(_SHELL_S, timeout_s + SLACK_S)
        if len(command) > _FRAME_BYTES or max_output_bytes > _FRAME_OUTPUT_BYTES:
            order = wire.ShellBody(command, timeout_s, user, max_output_bytes)
            return await self._run_by_http(f"shells/{wire.read_sandbox_id(name)}", key, order, bound_s)
        frame = wire.ShellFrame(
            command, timeout_s, user, max_output_bytes, sandbox_id=self._id, shell=wire.read_sandbox_id(name), key=key
        )
        return (await self._keyed("shell", key, frame, wire.ExecReply, bound_s)).result()

    async def close_shell(self, name: str, user: SandboxUser) -> None:
        """End a shell; see `envkit.protocols.Shell.close`."""
        await self._call("close_shell", wire.CloseShellFrame(self._id, wire.read_sandbox_id(name), user), DoneReply)

    @property
    def grader_home(self) -> str:
        """The folder that only a grader can enter, as it is called in sandboxes that isolate."""
        return GRADER_HOME

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        """Return the content of a file; see `envkit.protocols.Sandbox.read`."""
        if _is_text(path):
            most = min(max_bytes, wire.MAX_FRAME_FILE_BYTES)
            try:
                return (await self._call("read", wire.ReadFrame(self._id, path, most, user), wire.FileReply)).content
            except TooLargeError:
                if most == max_bytes:
                    raise
        target = f"{self._url}/files?{_query(path=path, max_bytes=str(max_bytes), user=user)}"
        with self._translated():
            return await self._line.patiently(partial(self._line.bulk.request, "GET", target, b"", timeout_s=_FILE_S))

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        """Write a file, as a whole or not at all; see `envkit.protocols.Sandbox.write`."""
        key = uuid.uuid4().hex
        if len(content) <= _FRAME_BYTES and _is_text(path):
            frame = wire.WriteFrame(self._id, path, content, mode, key, user)
            await self._keyed("write", key, frame, DoneReply, _FILE_S)
            return
        wanted = {} if mode is None else {"mode": f"{mode:o}"}
        target = f"{self._url}/files?{_query(path=path, user=user, **wanted)}"
        headers = {"Idempotency-Key": key}
        with self._translated():
            async with self._ended_with_us(key):
                ask = partial(self._line.bulk.request, "PUT", target, content, timeout_s=_FILE_S, headers=headers)
                await self._line.patiently(ask)

    async def upload(self, source: Path, target: str, *, user: FileUser = "agent") -> None:
        """Copy a file or folder into the sandbox; see `envkit.protocols.Sandbox.upload`.

        Raises:
            UnsupportedError: The client was made without `trees`.
        """
        if not target.rstrip("/"):
            raise UsageError(f"{target!r} is not the name of a file or folder")
        with self._translated():
            async with aclosing(self._line.trees.packed(source, "tree")) as pieces:
                url = f"{self._url}/tree?{_query(path=target, user=user)}"
                await self._line.bulk.send("PUT", url, pieces, timeout_s=_TREE_S)

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """Copy a file or folder out of the sandbox; see `envkit.protocols.Sandbox.download`.

        Raises:
            UsageError: `target` exists, or its folder does not.
            UnsupportedError: The client was made without `trees`.
        """
        trees = self._line.trees
        url = f"{self._url}/tree?{_query(path=source, max_bytes=str(max_bytes), user=user)}"
        with self._translated():
            async with aclosing(self._line.bulk.pieces(url, timeout_s=_TREE_S)) as pieces:
                await trees.unpacked(pieces, target, max_bytes=max_bytes)

    async def connect(self, place: str | int) -> socket.socket:
        """Refuse: nothing inside a remote sandbox can be connected to.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(f"sandbox {self._id} is remote: nothing inside it can be connected to")

    async def probe(self, timeout_s: float) -> float:
        """Return the seconds that an answer from inside took, the way to the server included."""
        began = clock.precise()
        with anyio.move_on_after(timeout_s):
            await self._call("probe", wire.ProbeFrame(self._id, timeout_s), wire.ProbeReply)
            return clock.precise() - began
        raise DeadlineError(f"sandbox {self._id} did not answer within {timeout_s:g} s")

    async def snapshot(self) -> str:
        """Keep the files as they are now, under a name that `SandboxClient.create` takes.

        Raises:
            UnsupportedError: This sandbox cannot.
        """
        key = uuid.uuid4().hex
        frame = wire.SnapshotFrame(self._id, key)
        return (await self._keyed("snapshot", key, frame, wire.SnapshotReply, _SHELL_S)).snapshot

    async def log(self) -> str:
        """Return the last 64 KiB of what its command wrote to standard error.

        Raises:
            UnsupportedError: It keeps none.
        """
        return (await self._call("log", wire.SandboxFrame(self._id), wire.LogReply)).log

    async def stats(self) -> Mapping[str, object]:
        """Return what it uses of its machine.

        Raises:
            UnsupportedError: It does not say.
        """
        return (await self._call("stats", wire.SandboxFrame(self._id), wire.StatsReply)).stats

    async def wait(self) -> Cause:
        """Return, once it is gone, why."""
        while True:
            try:
                cause = (await self._call("wait", wire.SandboxFrame(self._id), wire.WaitReply)).cause
            except SandboxLostError as error:
                return error.cause
            if cause is not None:
                return cause

    async def stop(self) -> None:
        """End everything in it; safe to repeat."""
        await self._line.stop(self._id)

    async def _call(self, method: str, body: msgspec.Struct, reply: type[T], timeout_s: float = CALL_S) -> T:
        with self._translated():
            return await self._line.call(method, body, reply, timeout_s)

    async def _keyed(self, method: str, key: str, body: msgspec.Struct, reply: type[T], timeout_s: float) -> T:
        async with self._ended_with_us(key):
            return await self._line.patiently(partial(self._call, method, body, reply, timeout_s))

    async def _run_by_http(self, what: str, key: str, body: msgspec.Struct, timeout_s: float) -> ExecResult:
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        with self._translated():
            async with self._ended_with_us(key):
                ask = partial(self._line.bulk.request, "POST", f"{self._url}/{what}", write(body), headers=headers)
                answer = await self._line.patiently(partial(ask, timeout_s=timeout_s))
        return self._line.decoded(what, answer, wire.ExecReply).result()

    @asynccontextmanager
    async def _ended_with_us(self, key: str) -> AsyncIterator[None]:
        """End the call with this key if we are cancelled during the block."""
        try:
            yield
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True), suppress(EnvkitError):
                await self._line.call("cancel", wire.CancelFrame(self._id, key), DoneReply, _CANCEL_S)
            raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """To who holds a sandbox, one that the server does not know any more is lost."""
        try:
            yield
        except SandboxNotFoundError as error:
            raise SandboxLostError(self._id, Cause(CauseKind.BACKEND_LOST, str(error))) from None


class RemoteShell:
    """A shell of a remote sandbox; satisfies `envkit.protocols.Shell`."""

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
        """End the shell and everything that it started; safe to repeat."""
        await self._sandbox.close_shell(self._name, self._user)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _query(**values: str) -> str:
    return urlencode(values, quote_via=quote, errors="surrogateescape")
