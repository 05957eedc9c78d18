"""What a pool lends: a sandbox whose calls end, with an error that says why, as soon as it is known to be gone."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from envkit.errors import UnsupportedError
from envkit.protocols import Sandbox, Shell
from envkit.types import EXEC_TIMEOUT_S, JSON, Cause, ExecResult, FileUser, SandboxUser

from ..agent_client.process import Program
from ..agent_client.sandbox import AgentSandbox
from .instance import STOPPED, Instance


class Lease:
    """A sandbox of a pool; satisfies `envkit.protocols.Sandbox`. Every call raises `SandboxLostError` when it is over.

    Args:
        member: The pool's.
        sandbox: What was started for it.
    """

    def __init__(self, member: Instance, sandbox: Sandbox) -> None:
        self._member = member
        self._sandbox = sandbox

    @property
    def id(self) -> str:
        return self._member.id

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
        result = await self._member.call(
            self._sandbox.exec,
            argv,
            timeout_s=timeout_s,
            env=env,
            cwd=cwd,
            stdin=stdin,
            user=user,
            max_output_bytes=max_output_bytes,
        )
        self._member.hear()
        return result

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> WatchedShell:
        """Return the shell `name`, which starts with its first command."""
        return WatchedShell(self._member, self._sandbox.shell(name, user=user))

    @property
    def grader_home(self) -> str:
        return self._sandbox.grader_home

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        """Return the content of a file; see `envkit.protocols.Sandbox.read`."""
        content = await self._member.call(self._sandbox.read, path, max_bytes=max_bytes, user=user)
        self._member.hear()
        return content

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        """Write a file; see `envkit.protocols.Sandbox.write`."""
        await self._member.call(self._sandbox.write, path, content, mode=mode, user=user)
        self._member.hear()

    async def upload(self, source: Path, target: str, *, user: FileUser = "agent") -> None:
        """Copy a file or folder of the host into the box; see `envkit.protocols.Sandbox.upload`."""
        await self._member.call(self._sandbox.upload, source, target, user=user)

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """Copy a file or folder of the box to the host; see `envkit.protocols.Sandbox.download`."""
        await self._member.call(self._sandbox.download, source, target, max_bytes=max_bytes, user=user)

    async def connect(self, place: str | int) -> socket.socket:
        """Connect to a socket inside; see `envkit.protocols.Sandbox.connect`. It ends with the box."""
        return await self._member.call(self._sandbox.connect, place)

    async def probe(self, timeout_s: float) -> float:
        """Return the seconds that an answer from inside took; see `envkit.protocols.Sandbox.probe`."""
        latency_s = await self._member.call(self._sandbox.probe, timeout_s)
        self._member.hear()
        return latency_s

    async def snapshot(self) -> str:
        """Keep the files as they are now; see `envkit.protocols.Sandbox.snapshot`. The pool knows them by this name."""
        return f"{self._member.node.name}/{await self._member.call(self._sandbox.snapshot)}"

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
        """Run a program for the length of the block, and talk to it.

        See `envkit.sandbox.agent_client.sandbox.Box.program`.

        Raises:
            UnsupportedError: Sandboxes of this kind cannot.
        """
        sandbox = self._agent("programs that are talked to")
        with self._member.within():
            async with sandbox.program(
                argv, timeout_s=timeout_s, env=env, cwd=cwd, user=user, terminal=terminal
            ) as program:
                yield program

    async def log(self) -> str:
        """Return the end of its command's standard error; see `envkit.sandbox.agent_client.sandbox.Box.log`."""
        return await self._member.call(self._agent("a log").log)

    async def stats(self) -> dict[str, JSON]:
        """Return what is known from inside; see `envkit.sandbox.agent_client.sandbox.Box.stats`."""
        return await self._member.call(self._agent("figures of its own").stats)

    async def wait(self) -> Cause:
        """Return, once it is over, why."""
        await self._member.gone.wait()
        return self._member.ended_by()

    async def stop(self) -> None:
        """End everything in it and wait until nothing is left of it; safe to repeat, not cancelled, bounded."""
        self._member.end(STOPPED)
        with anyio.CancelScope(shield=True):
            await self._member.cleared.wait()

    def _agent(self, wanted: str) -> AgentSandbox:
        if not isinstance(self._sandbox, AgentSandbox):
            raise UnsupportedError(f"{self.id} has not {wanted}")
        return self._sandbox


class WatchedShell:
    """A shell of a lent sandbox; satisfies `envkit.protocols.Shell`."""

    def __init__(self, member: Instance, shell: Shell) -> None:
        self._member = member
        self._shell = shell

    async def run(
        self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        result = await self._member.call(
            self._shell.run, command, timeout_s=timeout_s, max_output_bytes=max_output_bytes
        )
        self._member.hear()
        return result

    async def close(self) -> None:
        await self._member.call(self._shell.close)
