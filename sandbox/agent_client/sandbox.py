"""The sandbox class of all backends with an agent: combines calls to the agent with the sandbox's host resources."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

import anyio

from envkit import clock
from envkit.errors import (
    DeadlineError,
    EnvkitError,
    MissingFileError,
    RefusedFileError,
    SandboxError,
    SandboxLostError,
    SandboxStartError,
    TooLargeError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
from envkit.protocols import Sandbox
from envkit.types import EXEC_TIMEOUT_S, JSON, Cause, CauseKind, ExecResult, FileUser, SandboxUser
from envkit.types.sandboxes import Blocked

from ..host import run_dirs
from ..host.instances import not_ready
from ..host.layout import SOCKETS
from ..transfer import tar_stream
from . import port_forward
from .call import one_line
from .channel import AgentChannel, ChannelEndedError, RefusedCallError, Reply
from .exec_result import fields_of, result_of
from .programs import AgentShell, Program
from .teardown import HostResources, Teardown

_LOG_BYTES = 64 << 10
_LONGEST = 300
_ERRORS: Mapping[str, type[EnvkitError]] = {
    "missing": MissingFileError,
    "refused": RefusedFileError,
    "unsupported": UnsupportedError,
    "unreachable": UnreachableError,
    "too_large": TooLargeError,
}


class AgentSandbox(Sandbox):
    """One sandbox; implements `envkit.protocols.Sandbox`. Must be created in a running event loop.

    If the agent ends or violates the protocol, the sandbox is ended and its resources are released immediately, even
    if nobody calls `stop`. When the teardown is complete, `forget` receives this sandbox.

    Attributes:
        work: Path of the programs' working directory inside the sandbox.
        unenforced: Limits that this sandbox does not enforce although its backend usually does.
    """

    def __init__(
        self,
        sandbox_id: str,
        channel: AgentChannel,
        resources: HostResources,
        *,
        work: str,
        forget: Callable[[AgentSandbox], None],
    ) -> None:
        self.work = work
        self.unenforced = resources.unenforced
        self._id = sandbox_id
        self._channel = channel
        self._resources = resources
        self._shells: dict[tuple[str, SandboxUser], AgentShell] = {}
        self._teardown = Teardown(sandbox_id, channel, resources, partial(forget, self))

    @property
    def id(self) -> str:
        return self._id

    @property
    def grader_home(self) -> str:
        return self._resources.grader_home

    async def started(self, config: Mapping[str, JSON], timeout_s: float) -> None:
        """Configure the agent, and wait until the sandbox's command runs and its control socket is open.

        If this method raises, it has stopped the sandbox.

        Raises:
            SandboxEndedError: The sandbox started, but ended by itself before it was ready.
            SandboxStartError: The sandbox did not start, or was not ready in time.
        """
        is_up = False
        try:
            with anyio.move_on_after(timeout_s) as limit:
                await self._channel.open(config, timeout_s)
                is_up = True
                if config.get("command") or config.get("control_socket"):
                    # The agent replies when the command runs and the control socket is open.
                    await self._channel.call("ping")
            if limit.cancelled_caught:
                self._channel.fail(Cause(CauseKind.START_FAILED, f"not ready after {timeout_s:g} s"))
                raise ChannelEndedError(self._channel.reason)
        except ChannelEndedError:
            cause = await self.wait()
            await self.stop()
            # If `reason` is None, it was the agent that closed the channel, not the host.
            if is_up and not self._channel.reason:
                raise not_ready(self._id, cause) from None
            raise SandboxStartError(self._id, cause) from None
        except BaseException:
            await self.stop()
            raise

    async def reached(self, timeout_s: float, *, as_observer: bool = False) -> None:
        """Connect to the agent of a running, detached sandbox; leave the sandbox running if the agent does not reply.

        Args:
            timeout_s: Seconds to wait for the agent.
            as_observer: If True, this connection does not count as a client: the sandbox still ends when no other
                client has been connected for ``orphan_ttl_s``.

        Raises:
            UnreachableError: The agent did not reply within `timeout_s`.
        """
        self._teardown.is_released = True
        try:
            await self.started({"as_observer": True} if as_observer else {}, timeout_s)
        except SandboxStartError as error:
            raise UnreachableError(f"cannot connect to sandbox {self._id}: {error.cause}") from None
        self._teardown.is_released = False

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
        """Run a program to its end; see `envkit.protocols.Sandbox.exec`.

        Raises:
            ValueError: An argument or environment variable contains NUL, or all of them together exceed 1 MiB.
        """
        request = fields_of(argv, timeout_s, env, cwd, user, max_output_bytes)
        reply = await self.call("exec", feed=stdin or None, queue_s=0.0, **request, stdin=bool(stdin), pty=None)
        return await self.result(reply)

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
    ) -> AsyncIterator[Program]:
        """Run a program with streamed input and output; see `envkit.protocols.Sandbox.program`.

        Raises:
            ValueError: An argument or environment variable contains NUL, or all of them together exceed 1 MiB.
        """
        request = fields_of(argv, timeout_s, env, cwd, user, max_output_bytes=0)
        pty: JSON = None if terminal is None else [*terminal]
        try:
            call = await self._channel.start("exec", {**request, "stdin": True, "stream": True, "pty": pty})
            try:
                yield Program(self, call, has_terminal=terminal is not None)
            finally:
                await call.leave()
        except (ChannelEndedError, RefusedCallError) as error:
            raise await self._error(error) from None

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> AgentShell:
        key = name, user
        if key not in self._shells:
            self._shells[key] = AgentShell(self, name, user)
        return self._shells[key]

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        return (await self.call("read", path=path, max_bytes=max_bytes, user=user)).data

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        await self.call("write", feed=content, path=path, mode=mode, user=user)

    async def upload(self, source: Path, target: str, *, user: FileUser = "agent") -> None:
        """Copy a file or folder from the host into the sandbox; see `envkit.protocols.Sandbox.upload`.

        Links are copied as links, and `user` owns all copied files.

        Raises:
            UsageError: `source` is missing, cannot be read, or contains an entry other than a file, folder or link.
            RefusedFileError: `target` cannot be written.
        """
        folder, name = posixpath.split(target.rstrip("/"))
        if not name:
            raise UsageError(f"{target!r} is not the name of a file or folder")
        is_folder = await clock.to_thread(tar_stream.is_folder, source)
        async with aclosing(tar_stream.packed(source, name)) as pieces:
            await self.call("unpack", feed=pieces, path=target if is_folder else folder, user=user)

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """Copy a file or folder from the sandbox to the host; see `envkit.protocols.Sandbox.download`.

        Raises:
            UsageError: `target` already exists, or its parent folder does not exist.
        """
        # The stream may exceed `max_bytes`, because the tar header of a small file can be larger than the file.
        async with aclosing(self.packed(source, 2 * max_bytes + (16 << 20), user=user)) as pieces:
            await tar_stream.unpacked(pieces, target, max_bytes=max_bytes)

    async def connect(self, address: str | int) -> socket:
        await self._require_alive()
        if isinstance(address, str):
            if self._resources.sockets is not None:
                return run_dirs.connect(self._resources.sockets, address)
            if address in ("", ".", "..") or "/" in address or "\0" in address:
                raise UnreachableError(f"{address!r} is not the name of a socket")
            return await self._forward(socket=f"{SOCKETS}/{address}")
        if not 0 < address < 1 << 16:
            raise UnreachableError(f"{address} is not a port")
        return await self._forward(port=address)

    async def probe(self, timeout_s: float) -> float:
        began = clock.precise()
        with anyio.move_on_after(timeout_s):
            await self.call("ping")
            return clock.precise() - began
        raise DeadlineError(f"the sandbox did not answer within {timeout_s:g} s")

    async def snapshot(self) -> str:
        await self._require_alive()
        if self._resources.snapshot is None:
            raise UnsupportedError("sandboxes of this kind do not support snapshots")
        return await self._resources.snapshot()

    async def log(self) -> str:
        return (await self.call("log", max_bytes=_LOG_BYTES)).data.decode(errors="replace")

    async def stats(self) -> dict[str, JSON]:
        end = (await self.call("stats")).end
        found = {name: value for name, value in end.items() if name not in ("id", "end")}
        if self._resources.disk_percent is not None:
            found |= {"disk_place": "/", "disk_percent": self._resources.disk_percent()}
        return found

    @property
    def is_excused(self) -> bool:
        """Whether reading from the agent is paused because a caller does not read the reply to its call."""
        return self._channel.is_stalled

    async def diagnose(self) -> Blocked:
        """Return why the sandbox does not answer."""
        return Blocked.UNKNOWN if self._resources.diagnose is None else await self._resources.diagnose()

    async def wait(self) -> Cause:
        return await self._teardown.cause()

    async def stop(self) -> None:
        """End the sandbox and remove its files and other resources from the host; takes at most 15 s.

        Cancellation of the calling task does not interrupt this method. It may be called repeatedly.

        Raises:
            SandboxError: The sandbox could not be ended.
        """
        await self._teardown.stop()

    def while_alive(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background; cancel it when the sandbox has ended."""
        return self._teardown.while_alive(work)

    async def release(self) -> None:
        """Disconnect from the sandbox but leave it running. Later calls raise `SandboxLostError`, as after `stop`."""
        self._teardown.is_released = True
        await self.stop()

    async def call(
        self, do: str, *, feed: bytes | AsyncIterator[bytes] | None = None, queue_s: float = 0.0, **fields: JSON
    ) -> Reply:
        """Make a call to the agent; see `envkit.sandbox.agent_client.channel.AgentChannel.call`.

        Raises:
            SandboxLostError: The sandbox is gone.
            EnvkitError: The agent refused the call. The error code of the agent determines the subclass.
        """
        try:
            return await self._channel.call(do, feed=feed, queue_s=queue_s, **fields)
        except (ChannelEndedError, RefusedCallError) as error:
            raise await self._error(error, fields.get("path")) from None

    async def result(self, reply: Reply) -> ExecResult:
        """Decode the result of a command from the agent's reply; end the sandbox if the reply is invalid.

        Raises:
            SandboxLostError: The reply is invalid.
        """
        try:
            return result_of(reply)
        except ValueError as error:
            self._channel.broken(one_line(str(error)))
            raise SandboxLostError(self._id, await self.wait()) from None

    async def packed(self, source: str, max_bytes: int, *, user: FileUser = "agent") -> AsyncGenerator[bytes, None]:
        """Yield a file or folder of the sandbox as a tar stream. A malicious sandbox may send any other bytes.

        Args:
            source: Path of the file or folder.
            max_bytes: Maximum size of the stream.
            user: The user that reads the files. Entries that this user cannot read are left out.

        Raises:
            SandboxLostError: The sandbox has ended.
            EnvkitError: The stream is too large, or a file cannot be read.
        """
        try:
            call = await self._channel.start("pack", {"path": source, "max_bytes": max_bytes, "user": user})
            try:
                while (piece := await call.receive()) is not None:
                    yield piece[1]
            finally:
                await call.leave()
        except (ChannelEndedError, RefusedCallError) as error:
            raise await self._error(error, source) from None

    async def _forward(self, **address: JSON) -> socket:
        try:
            return await port_forward.connected(self._channel, self.while_alive, **address)
        except (ChannelEndedError, RefusedCallError) as error:
            raise await self._error(error) from None

    async def _error(self, error: ChannelEndedError | RefusedCallError, path: JSON = None) -> EnvkitError:
        """Return the public exception for an error of the channel; `path` is added to its message."""
        if isinstance(error, ChannelEndedError):
            return SandboxLostError(self._id, await self.wait())
        where = "" if path is None or str(path) in error.text else f"{str(path)[:_LONGEST]}: "
        return _ERRORS.get(error.code, SandboxError)(f"{where}{error.text}")

    async def _require_alive(self) -> None:
        if self._channel.is_ended:
            raise SandboxLostError(self._id, await self.wait())
