"""Scripted sandboxes for tests and for simulations of fleets on virtual time; they use no processes and no threads.

A script returns the `Fate` of each sandbox from its number and a random generator, which is seeded from the backend's
seed and that number. So the same script gives the same sandboxes in any order of calls. What moves real files and bytes
is tested with `envkit.sandbox.process.backend.ProcessBackend`.
"""

from __future__ import annotations

import math
import posixpath
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import anyio
import anyio.lowlevel

from envkit import clock
from envkit.errors import (
    DeadlineError,
    MissingFileError,
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
    TooLargeError,
    UnreachableError,
)
from envkit.protocols import Program
from envkit.sandbox.host.instances import refuse
from envkit.sandbox.host.layout import WORK
from envkit.types import (
    EXEC_TIMEOUT_S,
    GRADER_HOME,
    JSON,
    Cause,
    CauseKind,
    ExecResult,
    FileUser,
    SandboxSpec,
    SandboxUser,
    stable_hash,
)
from envkit.types.sandboxes import Blocked

_STOPPED = Cause(CauseKind.STOPPED, "stopped")
_KILLED = Cause(CauseKind.KILLED, "killed by signal 9 (SIGKILL)")
_GRACE_S = 10.0
"""Seconds beyond its timeout after which a call without an answer ends a sandbox, as for a real one."""
_ENFORCED = ("isolation", "network", "memory", "pids", "cpu", "disk", "uid", "seccomp")


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a sandbox runs.

    Attributes:
        argv: Program and arguments; ``("sh", "-c", command)`` for the command of a shell.
        env: Variables in addition to those of the spec.
        cwd: Working directory.
        shell: Name of its shell; None for `exec`.
        files: The sandbox's files by full path; it may change them.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    stdin: bytes
    user: SandboxUser
    shell: str | None
    files: dict[str, bytes]


Answer: TypeAlias = Callable[[Command], ExecResult]
"""Returns the result of a command, which takes its ``duration_s``, or less if the timeout stops it."""


def succeed(command: Command) -> ExecResult:
    """Let a command succeed at once without output."""
    return ExecResult(0)


@dataclass(frozen=True, slots=True)
class Fate:
    """How one sandbox behaves. Times in seconds.

    Attributes:
        start_s: Time until it is ready.
        start_failure: Cause of a failed start after that time; None if it starts.
        dies_after_s: Time from ready to its death by `cause`; infinity for never.
        hangs_after_s: Time from ready until it stops answering; infinity for never.
        answer: Returns the results of its commands.
    """

    start_s: float = 0.0
    start_failure: Cause | str | None = None
    dies_after_s: float = math.inf
    cause: Cause = _KILLED
    hangs_after_s: float = math.inf
    answer: Answer = succeed


Script: TypeAlias = Callable[[int, random.Random], Fate]


class FakeBackend:
    """Starts scripted sandboxes; satisfies `envkit.protocols.SandboxBackend`.

    Args:
        script: Returns the fate of sandbox number 0, 1, 2..., given its own random generator.
        seed: Seed of the generators.
        capabilities: Whether a limit is enforced, by name; those without an entry are.
        kind: Class of the sandboxes; None for `FakeSandbox`.

    Attributes:
        sandboxes: All sandboxes that became ready, in that order.
    """

    def __init__(
        self,
        script: Script = lambda number, rng: Fate(),
        *,
        seed: int = 0,
        capabilities: Mapping[str, bool] | None = None,
        kind: type[FakeSandbox] | None = None,
    ) -> None:
        self.sandboxes: list[FakeSandbox] = []
        self._script = script
        self._seed = seed
        self._capabilities = {**dict.fromkeys(_ENFORCED, True), **(capabilities or {})}
        self._kind = kind or FakeSandbox
        self._starts = 0
        self._snapshots: dict[str, dict[str, bytes]] = {}
        self._kept = 0
        self._is_open = False

    def capabilities(self) -> Mapping[str, bool]:
        return dict(self._capabilities)

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        return await self._start(spec, {})

    async def restore(self, snapshot: str, spec: SandboxSpec) -> FakeSandbox:
        return await self._start(spec, self._snapshots.get(snapshot), f"there is no snapshot {snapshot!r}")

    async def snapshot_bytes(self, snapshot: str) -> int:
        return sum(map(len, self._snapshots.get(snapshot, {}).values()))

    async def remove_snapshot(self, snapshot: str) -> None:
        self._snapshots.pop(snapshot, None)

    async def attach(self, sandbox_id: str) -> FakeSandbox:
        """Return a detached sandbox that was started before the backend was closed and reopened."""
        for sandbox in self._detached():
            if sandbox.id == sandbox_id:
                return sandbox
        raise SandboxError(f"there is no detached sandbox {sandbox_id!r}")

    async def list_detached(self, ledger: str | None = None) -> list[str]:
        """Return the ids of the detached sandboxes, or of those of one ledger."""
        return [sandbox.id for sandbox in self._detached() if ledger in (None, sandbox.spec.ledger)]

    async def remove(self, sandbox_id: str) -> None:
        """End a detached sandbox; raises as `attach`."""
        (await self.attach(sandbox_id)).die(Cause(CauseKind.BACKEND_LOST, "removed"))

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        for sandbox in (sandbox for sandbox in self.sandboxes if not sandbox.spec.detached):
            sandbox.die(_STOPPED)

    def _detached(self) -> list[FakeSandbox]:
        return [sandbox for sandbox in self.sandboxes if sandbox.spec.detached and not sandbox.is_gone]

    async def _start(self, spec: SandboxSpec, files: Mapping[str, bytes] | None, refusal: str = "") -> FakeSandbox:
        if not self._is_open:
            raise SandboxError("the backend is not open; use 'async with'")
        number = self._starts
        self._starts += 1
        sandbox_id = f"fake-{number}"
        if files is None:
            raise SandboxRefusedError(sandbox_id, refusal)
        refuse(sandbox_id, spec, self._capabilities)
        fate = self._script(number, random.Random(stable_hash(self._seed, number)))
        await anyio.sleep(min(fate.start_s, spec.start_timeout_s))
        if fate.start_s > spec.start_timeout_s:
            raise SandboxStartError(sandbox_id, f"not ready after {spec.start_timeout_s:g} s")
        if fate.start_failure is not None:
            raise SandboxStartError(sandbox_id, fate.start_failure)
        sandbox = self._kind(sandbox_id, spec, fate, dict(files), self._keep)
        self.sandboxes.append(sandbox)
        return sandbox

    def _keep(self, files: Mapping[str, bytes]) -> str:
        name = f"snapshot-{self._kept}"
        self._kept += 1
        self._snapshots[name] = dict(files)
        return name


class FakeSandbox:
    """A scripted sandbox without programs and folders; satisfies `envkit.protocols.Sandbox`. See `FakeBackend`.

    Attributes:
        files: Its files by full path.
        commands: Its commands, in order.
    """

    grader_home = GRADER_HOME
    unenforced: tuple[str, ...] = ()

    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        fate: Fate,
        files: dict[str, bytes],
        keep: Callable[[Mapping[str, bytes]], str],
    ) -> None:
        self.spec = spec
        self.files = files
        self.commands: list[Command] = []
        self._id = sandbox_id
        self._fate = fate
        self._keep = keep
        self._hangs_at = clock.now() + fate.hangs_after_s
        self._dies_at, self._cause = clock.now() + fate.dies_after_s, fate.cause
        self._is_ended, self._runs = anyio.Event(), anyio.Event()
        self._runs.set()
        self._shells: dict[tuple[str, SandboxUser], FakeShell] = {}

    @property
    def id(self) -> str:
        return self._id

    is_excused = False

    @property
    def is_gone(self) -> bool:
        return self._is_ended.is_set() or clock.now() >= self._dies_at

    def die(self, cause: Cause) -> None:
        """End it, unless it has already ended."""
        if not self.is_gone:
            self._cause = cause
        self._is_ended.set()
        self._runs.set()

    def pause(self) -> None:
        """Answer nothing until `resume`."""
        self._runs = anyio.Event()

    def resume(self) -> None:
        self._runs.set()

    async def diagnose(self) -> Blocked:
        return Blocked.UNKNOWN if self._runs.is_set() else Blocked.PAUSED

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
        command = Command(tuple(argv), dict(env or {}), cwd or _start_folder(user), stdin, user, None, self.files)
        return await self.run(command, timeout_s, max_output_bytes)

    async def run(self, command: Command, timeout_s: float, max_output_bytes: int) -> ExecResult:
        """Run `command` as the script answers it."""
        await self._pass(0.0)
        self.commands.append(command)
        result = self._fate.answer(command)
        await self._pass(min(result.duration_s, timeout_s), _GRACE_S + timeout_s)
        is_late = result.duration_s > timeout_s
        out, err = (text[max(0, len(text) - max_output_bytes) :] for text in (result.stdout_bytes, result.stderr_bytes))
        return ExecResult(
            exit_code=None if is_late else result.exit_code,
            stdout_bytes=out,
            stderr_bytes=err,
            timed_out=is_late or result.timed_out,
            truncated_bytes=len(result.stdout_bytes) + len(result.stderr_bytes) - len(out) - len(err),
            duration_s=min(result.duration_s, timeout_s),
            is_shell_lost=result.is_shell_lost,
            is_out_of_memory=result.is_out_of_memory,
        )

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> FakeShell:
        return self._shells.setdefault((name, user), FakeShell(self, name, user))

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        await self._pass(0.0)
        content = self.files.get(_full(path))
        if content is None:
            raise MissingFileError(f"{path}: there is no such file")
        if len(content) > max_bytes:
            raise TooLargeError(f"{path} has more than {max_bytes} bytes")
        return content

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        await self._pass(0.0)
        self.files[_full(path)] = content

    async def upload(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    async def download(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def program(self, *_: Any, **__: Any) -> AbstractAsyncContextManager[Program]:
        raise NotImplementedError

    async def connect(self, address: str | int) -> socket.socket:
        raise UnreachableError(f"nothing listens on {address}")

    async def probe(self, timeout_s: float) -> float:
        with anyio.move_on_after(timeout_s):
            await self._pass(0.0, math.inf)
            return 0.0
        raise DeadlineError(f"the sandbox did not answer within {timeout_s:g} s")

    async def snapshot(self) -> str:
        await self._pass(0.0)
        return self._keep(self.files)

    async def log(self) -> str:
        await self._pass(0.0)
        return ""

    async def stats(self) -> Mapping[str, JSON]:
        await self._pass(0.0)
        return {}

    async def wait(self) -> Cause:
        with anyio.CancelScope(deadline=self._dies_at):
            await self._is_ended.wait()
        return self._cause

    async def stop(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.die(_STOPPED)

    async def _pass(self, seconds: float, grace_s: float = _GRACE_S) -> None:
        """Let a call take `seconds`; if the sandbox hangs meanwhile, the call ends it after `grace_s`.

        Raises:
            SandboxLostError: The sandbox is gone.
        """
        await anyio.lowlevel.checkpoint()
        if not self._runs.is_set():
            with anyio.CancelScope(deadline=self._dies_at):
                await self._runs.wait()
        is_answered = clock.now() + seconds < self._hangs_at
        until = clock.now() + (seconds if is_answered else grace_s)
        if not self.is_gone and until > clock.now():
            with anyio.CancelScope(deadline=min(until, self._dies_at)):
                await self._is_ended.wait()
        if not self.is_gone and not is_answered:
            self.die(Cause(CauseKind.UNRESPONSIVE, "it does not answer"))
        if self.is_gone:
            raise SandboxLostError(self._id, self._cause)


class FakeShell:
    """A shell of a scripted sandbox, whose commands run one after another; satisfies `envkit.protocols.Shell`."""

    def __init__(self, sandbox: FakeSandbox, name: str, user: SandboxUser) -> None:
        self._sandbox = sandbox
        self._name = name
        self._user: SandboxUser = user
        self._turn = anyio.Lock()

    async def run(
        self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        folder = _start_folder(self._user)
        started = Command(("sh", "-c", command), {}, folder, b"", self._user, self._name, self._sandbox.files)
        async with self._turn:
            return await self._sandbox.run(started, timeout_s, max_output_bytes)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()


def _start_folder(user: SandboxUser) -> str:
    return GRADER_HOME if user == "grader" else WORK


def _full(path: str) -> str:
    return posixpath.normpath(posixpath.join(WORK, path))
