"""Leases of sandboxes. When a sandbox is lost, all calls through its lease fail immediately, with the cause."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import anyio

from envkit.protocols import Program, Sandbox, Shell
from envkit.types import Cause, SandboxUser
from envkit.types.sandboxes import Blocked

from .health import Diagnosable
from .instance import STOPPED, Instance

T = TypeVar("T")
P = ParamSpec("P")


def _watched(
    method: Callable[Concatenate[Any, P], T], *, is_answer: bool = True
) -> Callable[Concatenate[Lease | WatchedShell | WatchedProgram, P], T]:
    """Return a method that calls `method` of the leased sandbox, shell or program.

    The call is cancelled when the sandbox ends. If `is_answer`, its result shows that the sandbox answers.
    """

    @wraps(method)
    async def call(self: Lease | WatchedShell | WatchedProgram, *args: P.args, **kwargs: P.kwargs) -> object:
        result = await self._instance.call(getattr(self._watched, method.__name__), *args, **kwargs)
        if is_answer:
            self._instance.answered()
        return result

    return cast("Callable[Concatenate[Lease | WatchedShell | WatchedProgram, P], T]", call)


def _in_use(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Lease, P], T]:
    """Return the method that runs a program in the leased sandbox, which it counts as a use of the sandbox."""

    @wraps(method)
    @asynccontextmanager
    async def program(self: Lease, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[WatchedProgram]:
        with self._instance.in_use():
            async with getattr(self._watched, method.__name__)(*args, **kwargs) as program:
                yield WatchedProgram(self._instance, program)

    return cast("Callable[Concatenate[Lease, P], T]", program)


class Lease:
    """A leased sandbox; implements `envkit.protocols.Sandbox`. After its end, calls raise `SandboxLostError`."""

    def __init__(self, instance: Instance) -> None:
        assert instance.sandbox is not None
        self._instance = instance
        self._watched = instance.sandbox

    @property
    def id(self) -> str:
        return self._instance.id

    @property
    def grader_home(self) -> str:
        return self._watched.grader_home

    exec = _watched(Sandbox.exec)
    read = _watched(Sandbox.read)
    write = _watched(Sandbox.write)
    upload = _watched(Sandbox.upload)
    download = _watched(Sandbox.download)
    probe = _watched(Sandbox.probe)
    log = _watched(Sandbox.log)
    stats = _watched(Sandbox.stats)
    connect = _watched(Sandbox.connect, is_answer=False)
    program = _in_use(Sandbox.program)

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> WatchedShell:
        """Return the shell `name`, which starts when it runs its first command."""
        return WatchedShell(self._instance, self._watched.shell(name, user=user))

    async def snapshot(self) -> str:
        """Take a snapshot and return its name in the pool, ``NODE/NAME``; see `envkit.protocols.Sandbox.snapshot`."""
        return f"{self._instance.node.name}/{await self._instance.call(self._watched.snapshot)}"

    async def diagnose(self) -> Blocked:
        """Return why the sandbox does not answer, if its backend finds it out."""
        watched: object = self._watched
        return await watched.diagnose() if isinstance(watched, Diagnosable) else Blocked.UNKNOWN

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
        self._watched = shell

    run = _watched(Shell.run)
    close = _watched(Shell.close, is_answer=False)


class WatchedProgram:
    """A program in a leased sandbox; implements `envkit.protocols.Program`. Its methods may run in different tasks."""

    def __init__(self, instance: Instance, program: Program) -> None:
        self._instance = instance
        self._watched = program

    receive = _watched(Program.receive, is_answer=False)
    send = _watched(Program.send, is_answer=False)
    send_eof = _watched(Program.send_eof, is_answer=False)
    resize = _watched(Program.resize, is_answer=False)
    result = _watched(Program.result, is_answer=False)
