"""Leases of sandboxes. When a sandbox is lost, all calls through its lease fail immediately, with the cause."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from envkit.errors import UnsupportedError
from envkit.protocols import Shell
from envkit.types import EXEC_TIMEOUT_S, JSON, Cause, ExecResult, FileUser, SandboxUser

from ..agent_client.process import Program
from ..agent_client.sandbox import AgentSandbox
from .instance import STOPPED, Instance


class Lease:
    """A leased sandbox; implements `envkit.protocols.Sandbox`. After its end, calls raise `SandboxLostError`.

    Args:
        instance: The pool's record of a sandbox that has started.
    """

    def __init__(self, instance: Instance) -> None:
        assert instance.sandbox is not None
        self._instance = instance
        self._sandbox = instance.sandbox

    @property
    def id(self) -> str:
        return self._instance.id

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
        result = await self._instance.call(
            self._sandbox.exec,
            argv,
            timeout_s=timeout_s,
            env=env,
            cwd=cwd,
            stdin=stdin,
            user=user,
            max_output_bytes=max_output_bytes,
        )
        self._instance.answered()
        return result

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> WatchedShell:
        """Return the shell `name`, which starts when it runs its first command."""
        return WatchedShell(self._instance, self._sandbox.shell(name, user=user))

    @property
    def grader_home(self) -> str:
        return self._sandbox.grader_home

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        """Read a file; see `envkit.protocols.Sandbox.read`."""
        content = await self._instance.call(self._sandbox.read, path, max_bytes=max_bytes, user=user)
        self._instance.answered()
        return content

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        """Write a file; see `envkit.protocols.Sandbox.write`."""
        await self._instance.call(self._sandbox.write, path, content, mode=mode, user=user)
        self._instance.answered()

    async def upload(self, source: Path, target: str, *, user: FileUser = "agent") -> None:
        """Copy a file or folder from the host into the sandbox; see `envkit.protocols.Sandbox.upload`."""
        await self._instance.call(self._sandbox.upload, source, target, user=user)

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """Copy a file or folder from the sandbox to the host; see `envkit.protocols.Sandbox.download`."""
        await self._instance.call(self._sandbox.download, source, target, max_bytes=max_bytes, user=user)

    async def connect(self, address: str | int) -> socket.socket:
        """Connect to a socket in the sandbox; see `envkit.protocols.Sandbox.connect`."""
        return await self._instance.call(self._sandbox.connect, address)

    async def probe(self, timeout_s: float) -> float:
        """Probe the sandbox and return its latency in seconds; see `envkit.protocols.Sandbox.probe`."""
        latency_s = await self._instance.call(self._sandbox.probe, timeout_s)
        self._instance.answered()
        return latency_s

    async def snapshot(self) -> str:
        """Take a snapshot and return its name in the pool, ``NODE/NAME``; see `envkit.protocols.Sandbox.snapshot`."""
        return f"{self._instance.node.name}/{await self._instance.call(self._sandbox.snapshot)}"

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
        """Run an interactive program for the block; see `envkit.sandbox.agent_client.sandbox.AgentSandbox.program`.

        Raises:
            UnsupportedError: The backend does not support interactive programs.
        """
        sandbox = self._agent("interactive programs")
        with self._instance.within():
            async with sandbox.program(
                argv, timeout_s=timeout_s, env=env, cwd=cwd, user=user, terminal=terminal
            ) as program:
                yield program

    async def log(self) -> str:
        """Return the last 64 KiB of the standard error of the sandbox's command."""
        return await self._instance.call(self._agent("command logs").log)

    async def stats(self) -> dict[str, JSON]:
        """Return the sandbox's resource use; see `envkit.sandbox.agent_client.sandbox.AgentSandbox.stats`."""
        return await self._instance.call(self._agent("resource statistics").stats)

    async def wait(self) -> Cause:
        """Wait until the sandbox has ended, and return the cause."""
        await self._instance.gone.wait()
        return self._instance.ended_by()

    async def stop(self) -> None:
        """Stop the sandbox and wait until it is fully removed. Idempotent and shielded from cancellation."""
        self._instance.end(STOPPED)
        with anyio.CancelScope(shield=True):
            await self._instance.cleared.wait()

    def _agent(self, wanted: str) -> AgentSandbox:
        if not isinstance(self._sandbox, AgentSandbox):
            raise UnsupportedError(f"sandbox {self.id} does not support {wanted}")
        return self._sandbox


class WatchedShell:
    """A shell of a leased sandbox; implements `envkit.protocols.Shell`."""

    def __init__(self, instance: Instance, shell: Shell) -> None:
        self._instance = instance
        self._shell = shell

    async def run(
        self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        result = await self._instance.call(
            self._shell.run, command, timeout_s=timeout_s, max_output_bytes=max_output_bytes
        )
        self._instance.answered()
        return result

    async def close(self) -> None:
        await self._instance.call(self._shell.close)
