"""Leases of sandboxes. When a sandbox is lost, all calls through its lease fail immediately, with the cause."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

import anyio

from envkit.protocols import Program, Sandbox, Shell
from envkit.types import EXEC_TIMEOUT_S, Cause, ExecResult, SandboxUser

from .instance import STOPPED, Instance

T = TypeVar("T")
P = ParamSpec("P")


def _answered_by(method: Callable[Concatenate[Sandbox, P], T]) -> Callable[Concatenate[Lease, P], T]:
    """Return the method of `Lease` that calls the asynchronous `method` of its sandbox, and records the answer."""

    @wraps(method)
    async def call(self: Lease, *args: P.args, **kwargs: P.kwargs) -> object:
        result = await self._instance.call(getattr(self._sandbox, method.__name__), *args, **kwargs)
        self._instance.answered()
        return result

    return cast("Callable[Concatenate[Lease, P], T]", call)


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

    @property
    def grader_home(self) -> str:
        return self._sandbox.grader_home

    exec = _answered_by(Sandbox.exec)
    read = _answered_by(Sandbox.read)
    write = _answered_by(Sandbox.write)
    upload = _answered_by(Sandbox.upload)
    download = _answered_by(Sandbox.download)
    probe = _answered_by(Sandbox.probe)
    log = _answered_by(Sandbox.log)
    stats = _answered_by(Sandbox.stats)

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
    ) -> AsyncIterator[WatchedProgram]:
        """Run a program with streamed input and output; see `envkit.protocols.Sandbox.program`."""
        with self._instance.in_use():
            async with self._sandbox.program(
                argv, timeout_s=timeout_s, env=env, cwd=cwd, user=user, terminal=terminal
            ) as program:
                yield WatchedProgram(self._instance, program)

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> WatchedShell:
        """Return the shell `name`, which starts when it runs its first command."""
        return WatchedShell(self._instance, self._sandbox.shell(name, user=user))

    async def connect(self, address: str | int) -> socket.socket:
        """Connect to a socket in the sandbox; see `envkit.protocols.Sandbox.connect`."""
        return await self._instance.call(self._sandbox.connect, address)

    async def snapshot(self) -> str:
        """Take a snapshot and return its name in the pool, ``NODE/NAME``; see `envkit.protocols.Sandbox.snapshot`."""
        return f"{self._instance.node.name}/{await self._instance.call(self._sandbox.snapshot)}"

    async def wait(self) -> Cause:
        """Wait until the sandbox has ended, and return the cause."""
        await self._instance.gone.wait()
        return self._instance.ended_by()

    async def stop(self) -> None:
        """Stop the sandbox and wait until it is fully removed. Idempotent and shielded from cancellation."""
        self._instance.end(STOPPED)
        with anyio.CancelScope(shield=True):
            await self._instance.cleared.wait()


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


class WatchedProgram:
    """A program in a leased sandbox; implements `envkit.protocols.Program`. Its methods may run in different tasks."""

    def __init__(self, instance: Instance, program: Program) -> None:
        self._instance = instance
        self._program = program

    async def receive(self) -> tuple[str, bytes] | None:
        return await self._instance.call(self._program.receive)

    async def send(self, content: bytes) -> None:
        await self._instance.call(self._program.send, content)

    async def send_eof(self) -> None:
        await self._instance.call(self._program.send_eof)

    async def resize(self, rows: int, columns: int) -> None:
        await self._instance.call(self._program.resize, rows, columns)

    async def result(self) -> ExecResult:
        return await self._instance.call(self._program.result)
