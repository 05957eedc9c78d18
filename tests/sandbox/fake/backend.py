"""Scripted sandboxes for tests and for simulations of fleets on virtual time; they use no processes and no threads.

For the scripts see `tests.sandbox.fake.script`.
"""

from __future__ import annotations

import math
import posixpath
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import anyio
import anyio.lowlevel

from envkit import clock
from envkit.errors import (
    DeadlineError,
    MissingFileError,
    RefusedFileError,
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
    TooLargeError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
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
from tests.sandbox.fake.script import Answer, Command, Fate, Script, succeed

__all__ = ["Answer", "Command", "FakeBackend", "FakeSandbox", "FakeShell", "Fate", "Script", "succeed"]

_STOPPED = Cause(CauseKind.STOPPED, "stopped")
_EXPIRED = Cause(CauseKind.EXPIRED, "time to live exceeded")
_GRACE_S = 10.0
"""Seconds beyond its timeout after which a call without an answer ends a sandbox, as for a real one."""
_ENFORCED = ("isolation", "network", "memory", "pids", "cpu", "disk", "uid", "seccomp")


def _plain(number: int, rng: random.Random) -> Fate:
    return Fate()


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
        script: Script = _plain,
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
        """Start `spec`; see `envkit.protocols.SandboxBackend.start`."""
        return await self._start(spec, {})

    async def restore(self, snapshot: str, spec: SandboxSpec) -> FakeSandbox:
        """Start `spec` with the files of `snapshot`; see `envkit.protocols.SandboxBackend.restore`."""
        files = self._snapshots.get(snapshot)
        return await self._start(spec, files, None if files is not None else f"there is no snapshot {snapshot!r}")

    async def snapshot_bytes(self, snapshot: str) -> int:
        """Return the total size of the files of a snapshot."""
        return sum(map(len, self._snapshots.get(snapshot, {}).values()))

    async def remove_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot; safe to repeat."""
        self._snapshots.pop(snapshot, None)

    async def attach(self, sandbox_id: str) -> FakeSandbox:
        """Return a detached sandbox that was started before the backend was closed and reopened."""
        found = [
            sandbox
            for sandbox in self.sandboxes
            if sandbox.id == sandbox_id and sandbox.spec.detached and not sandbox.is_gone
        ]
        if not found:
            raise SandboxError(f"there is no detached sandbox {sandbox_id!r}")
        return found[0]

    async def list_detached(self, ledger: str | None = None) -> list[str]:
        """Return the ids of the detached sandboxes, or of those of one ledger."""
        alive = [sandbox for sandbox in self.sandboxes if sandbox.spec.detached and not sandbox.is_gone]
        return [sandbox.id for sandbox in alive if ledger in (None, sandbox.spec.ledger)]

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

    async def _start(
        self, spec: SandboxSpec, files: Mapping[str, bytes] | None, refusal: str | None = None
    ) -> FakeSandbox:
        if not self._is_open:
            raise SandboxError("the backend is not open; use 'async with'")
        number = self._starts
        self._starts += 1
        sandbox_id = f"fake-{number}"
        if refusal is not None:
            raise SandboxRefusedError(sandbox_id, refusal)
        refuse(sandbox_id, spec, self._capabilities)
        fate = self._script(number, random.Random(stable_hash(self._seed, number)))
        await anyio.sleep(min(fate.start_s, spec.start_timeout_s))
        if fate.start_s > spec.start_timeout_s:
            raise SandboxStartError(sandbox_id, f"not ready after {spec.start_timeout_s:g} s")
        if fate.start_failure is not None:
            raise SandboxStartError(sandbox_id, fate.start_failure)
        sandbox = self._kind(sandbox_id, spec, fate, dict(files or {}), self._keep)
        self.sandboxes.append(sandbox)
        return sandbox

    def _keep(self, files: Mapping[str, bytes]) -> str:
        name = f"snapshot-{self._kept}"
        self._kept += 1
        self._snapshots[name] = dict(files)
        return name


class FakeSandbox:
    """A scripted sandbox; satisfies `envkit.protocols.Sandbox`. Created by `FakeBackend`.

    Attributes:
        spec: Its spec.
        files: Its files by full path.
        commands: Its commands, in order.
        unenforced: Empty.
        grader_home: Folder that the agent cannot access; the owners of other files are not recorded.
    """

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
        self.unenforced: tuple[str, ...] = ()
        self.grader_home = GRADER_HOME
        self._id = sandbox_id
        self._fate = fate
        self._keep = keep
        ready = clock.now()
        ttl_s = math.inf if spec.ttl_s is None else spec.ttl_s
        self._dies_at = ready + min(fate.dies_after_s, ttl_s)
        self._hangs_at = ready + fate.hangs_after_s
        self._cause = fate.cause if fate.dies_after_s <= ttl_s else _EXPIRED
        self._is_ended, self._runs = anyio.Event(), anyio.Event()
        self._runs.set()
        self._shells: dict[tuple[str, SandboxUser], FakeShell] = {}

    @property
    def id(self) -> str:
        return self._id

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

    async def diagnose(self) -> str:
        return "" if self._runs.is_set() else "paused"

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
        """Return the script's answer; see `envkit.protocols.Sandbox.exec`."""
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
    ) -> AsyncIterator[FakeProgram]:
        """Run a program with the script's answer, without its input; see `envkit.protocols.Sandbox.program`."""
        yield FakeProgram(await self.exec(argv, timeout_s=timeout_s, env=env, cwd=cwd, user=user))

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> FakeShell:
        """Return the shell `name`, whose commands run one after another."""
        return self._shells.setdefault((name, user), FakeShell(self, name, user))

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        await self._pass(0.0)
        content = self.files.get(_full(path))
        if content is None or not self._reaches(user, path):
            raise MissingFileError(f"{path}: there is no such file")
        if len(content) > max_bytes:
            raise TooLargeError(f"{path} has more than {max_bytes} bytes")
        return content

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        await self._pass(0.0)
        self._require_reach(user, path)
        self.files[_full(path)] = content

    async def upload(self, source: Path, target: str, *, user: FileUser = "agent") -> None:
        """Copy a file, or the plain files of a folder; see `envkit.protocols.Sandbox.upload`."""
        await self._pass(0.0)
        self._require_reach(user, target)
        self.files.update(_read_tree(source, _full(target)))

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        await self._pass(0.0)
        path = _full(source)
        found = {name: self.files[name] for name in self.files if _is_in(path, name) and self._reaches(user, name)}
        if not found:
            raise MissingFileError(f"{source}: there is no such file or folder")
        if sum(map(len, found.values())) > max_bytes:
            raise TooLargeError(f"{source} has more than {max_bytes} bytes")
        _write_tree({name[len(path) :].lstrip("/"): content for name, content in found.items()}, target)

    async def connect(self, address: str | int) -> socket.socket:
        await self._pass(0.0)
        if address not in self._fate.listens:
            raise UnreachableError(f"nothing listens on {address}")
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        self._fate.listens[address](theirs)
        return ours

    async def probe(self, timeout_s: float) -> float:
        with anyio.move_on_after(timeout_s):
            await self._pass(0.0, math.inf)
            return 0.0
        raise DeadlineError(f"the sandbox did not answer within {timeout_s:g} s")

    async def snapshot(self) -> str:
        await self._pass(0.0)
        return self._keep({name: self.files[name] for name in self.files if self._reaches("agent", name)})

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

    def _reaches(self, user: FileUser, path: str) -> bool:
        if user not in ("agent", "grader"):
            raise UnsupportedError(f"it reads and writes no files as {user}")
        return user == "grader" or not _is_in(self.grader_home, _full(path))

    def _require_reach(self, user: FileUser, path: str) -> None:
        if not self._reaches(user, path):
            raise RefusedFileError(f"{path}: Permission denied")

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


class FakeProgram:
    """A program of a scripted sandbox; satisfies `envkit.protocols.Program`."""

    def __init__(self, result: ExecResult) -> None:
        self._result = result
        self._output = [("out", result.stdout_bytes), ("err", result.stderr_bytes)]

    async def receive(self) -> tuple[str, bytes] | None:
        await anyio.lowlevel.checkpoint()
        return self._output.pop(0) if self._output else None

    async def send(self, content: bytes) -> None:
        await anyio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def resize(self, rows: int, columns: int) -> None:
        await anyio.lowlevel.checkpoint()

    async def result(self) -> ExecResult:
        return replace(self._result, stdout_bytes=b"", stderr_bytes=b"")


class FakeShell:
    """A shell of a scripted sandbox; satisfies `envkit.protocols.Shell`."""

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


def _is_in(folder: str, name: str) -> bool:
    return name == folder or name.startswith(f"{folder}/")


def _read_tree(source: Path, target: str) -> dict[str, bytes]:
    if source.is_file():
        return {target: source.read_bytes()}
    if not source.is_dir():
        raise UsageError(f"{source}: there is no such file or folder")
    inside = (path for path in sorted(source.rglob("*")) if path.is_file() and not path.is_symlink())
    return {f"{target}/{path.relative_to(source).as_posix()}": path.read_bytes() for path in inside}


def _write_tree(files: Mapping[str, bytes], target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists")
    for name, content in files.items():
        path = target / name if name else target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
