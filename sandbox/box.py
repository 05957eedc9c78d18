"""A running sandbox on this machine, and the set of those that one backend has started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import anyio

from envkit import clock
from envkit.errors import SandboxError, SandboxLostError, SandboxStartError
from envkit.sandbox import folders
from envkit.sandbox.child import Child
from envkit.types import ExecResult, SandboxSpec

KEPT_BYTES = 64 << 10
"""How much of the end of a box's standard error is kept."""
EXEC_KEPT_BYTES = 1 << 20
"""How much of the end of each output of a command is kept."""
_GRACE_S = 2.0
"""Seconds that the gentle way of ending a process tree, which misses nobody, may take."""
_SAME_DEATH_S = 0.3
"""Who is killed with the box may be seen to end this much earlier than the box."""

KEEPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")))
"""Runs a program and ends everything that it started; takes its order from standard input."""


@dataclass(frozen=True, slots=True)
class Entry:
    """How to start a keeper inside a box that is running.

    Attributes:
        argv: What runs the keeper there.
        pass_fds: What it inherits.
    """

    argv: tuple[str, ...]
    pass_fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """A box as seen from inside and from outside.

    Attributes:
        env: Environment of everything in it.
        work: Folder, named as inside, that programs start in.
        sockets: Folder, named as outside, that its sockets appear in.
        enter: Gives an `Entry` for the length of a block; raises `UnsupportedError` where there is no way in, and
            `ProcessLookupError` when there is nobody inside any more.
        end: Ends everything in it; called more than once.
        codes_for_signals: Whether death by signal n is reported as exit code 128 + n.
    """

    env: Mapping[str, str]
    work: str
    sockets: Path
    enter: Callable[[], AbstractContextManager[Entry]]
    end: Callable[[], None]
    codes_for_signals: bool = False


class Box:
    """One sandbox; satisfies `envkit.protocols.Sandbox`.

    Args:
        box_id: Its id.
        child: The process that its life hangs on.
        place: What it looks like.
        forget: Called once it is stopped, to give back its folder.
    """

    def __init__(self, box_id: str, child: Child, place: Place, forget: Callable[[Box], None]) -> None:
        self._id = box_id
        self._child = child
        self._place = place
        self._forget = forget
        self._is_stopped = False

    @property
    def id(self) -> str:
        return self._id

    @property
    def pid(self) -> int:
        """Process id, on the host, of what its life hangs on."""
        return self._child.pid

    @property
    def log(self) -> str:
        """The end of what it wrote to standard error, at most 64 KiB."""
        return self._child.stderr.text()

    async def started(self, timeout_s: float, *, order: bytes = b"") -> None:
        """Return once its command runs, having written `order` to its life line.

        Raises:
            SandboxStartError: It ended, or did not run in time; the box is stopped.
        """
        runs = False
        try:
            with anyio.move_on_after(timeout_s):
                await self._child.order(order)
                runs = await self._child.first_output()
        finally:
            if not runs:
                cause = f"not running after {timeout_s:g} s" if self._child.returncode is None else self._cause()
                await self.stop()
        if not runs:
            raise SandboxStartError(self._id, cause)

    async def exec(self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
        """Run `argv` in the box; see `envkit.protocols.Sandbox.exec`.

        Everything that it started is ended with it. Of each output the last MiB is kept. A program that cannot be
        started has exit code 127 (not found) or 126.

        Raises:
            SandboxLostError: The box is gone.
            UnsupportedError: There is no way into this box on this machine.
        """
        self._check_alive()
        order = keeper_order(self._place.work, argv, {**self._place.env, **(env or {})})
        try:
            with self._place.enter() as entry:
                command = Child(entry.argv, env={}, keep_bytes=EXEC_KEPT_BYTES, life_line=True, pass_fds=entry.pass_fds)
        except ProcessLookupError:
            with anyio.move_on_after(_SAME_DEATH_S):
                await self._child.wait()
            raise SandboxLostError(self._id, self._cause()) from None
        began = clock.now()
        try:
            with anyio.move_on_after(timeout_s) as limit:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._end_with_box, command)
                    await command.order(order)
                    await command.wait()
                    tasks.cancel_scope.cancel()
        finally:
            await command.end(command.let_go, grace_s=_GRACE_S)
        if not limit.cancelled_caught and command.returncode == -signal.SIGKILL:
            with anyio.move_on_after(_SAME_DEATH_S):
                await self._child.wait()
        self._check_alive()
        return ExecResult(
            exit_code=None if limit.cancelled_caught else command.returncode,
            stdout=command.stdout.text(),
            stderr=command.stderr.text(),
            timed_out=limit.cancelled_caught,
            truncated=command.stdout.cut > 0 or command.stderr.cut > 0,
            duration_s=clock.now() - began,
        )

    async def connect(self, name: str) -> socket:
        """Connect to a Unix socket inside; see `envkit.protocols.Sandbox.connect`."""
        self._check_alive()
        return folders.connect(self._place.sockets, name)

    async def wait(self) -> str:
        """Return, once the box is gone, the cause in one line."""
        await self._child.wait()
        return self._cause()

    async def stop(self) -> None:
        """End everything in the box and remove its folder; safe to repeat, not cancelled, bounded (7 s)."""
        self._is_stopped = self._is_stopped or self._child.returncode is None
        with anyio.CancelScope(shield=True):
            await self._child.end(self._place.end, grace_s=_GRACE_S)
            self._place.end()  # whoever outlived the process that we watch
            self._forget(self)
            await clock.to_thread(folders.remove, self._place.sockets.parent)

    async def _end_with_box(self, command: Child) -> None:
        await self._child.wait()
        command.let_go()

    def _check_alive(self) -> None:
        if self._is_stopped or self._child.returncode is not None:
            raise SandboxLostError(self._id, self._cause())

    def _cause(self) -> str:
        code = self._child.returncode
        if self._is_stopped:
            return "stopped"
        if code is None:
            return "everything in it has ended"
        if self._place.codes_for_signals and 128 < code <= 192:
            code = 128 - code
        if code < 0:
            return f"killed by signal {-code}{_signal_name(-code)}"
        line = self._child.stderr.last_line() if code else ""
        return f"exited with code {code}{f': {line}' if line else ''}"


class Boxes:
    """The boxes of one backend, and the folder that holds theirs.

    Args:
        kind: First part of the ids.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._started = 0
        self._folder: Path | None = None
        self._boxes: set[Box] = set()

    async def open(self) -> None:
        """Clear away what earlier owners left, and make the folder."""
        await clock.to_thread(folders.reap)
        self._folder = folders.new_run_folder()

    async def close(self) -> None:
        """Stop what still runs and remove the folder; not cancelled."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for box in list(self._boxes):
                    tasks.start_soon(box.stop)
            if self._folder is not None:
                await clock.to_thread(folders.remove, self._folder)
                self._folder = None

    def new_place(self, spec: SandboxSpec, capabilities: Mapping[str, bool]) -> tuple[str, Path]:
        """Return an id and a folder with ``s`` and ``home`` in it.

        Raises:
            SandboxStartError: The spec asks for what `capabilities` do not hold.
        """
        if self._folder is None:
            raise SandboxError("the backend is not open; use 'async with'")
        self._started += 1
        box_id = f"{self._kind}-{self._started}"
        if spec.untrusted and (missing := [name for name, holds in capabilities.items() if not holds]):
            raise SandboxStartError(box_id, f"untrusted programs are refused: not enforced here: {', '.join(missing)}")
        if spec.memory_mib is not None and not capabilities["memory"]:
            raise SandboxStartError(box_id, f"memory_mib={spec.memory_mib} is refused: memory is not bounded here")
        folder = self._folder / box_id
        for part in (folder, folder / "s", folder / "home"):
            part.mkdir(mode=0o700)
        return box_id, folder

    def add(self, box: Box) -> None:
        self._boxes.add(box)

    def discard(self, box: Box) -> None:
        self._boxes.discard(box)


def keeper_order(folder: str, argv: Sequence[str], env: Mapping[str, str]) -> bytes:
    """Return what tells a keeper to run `argv` in `folder`."""
    parts = [folder, str(len(argv)), *argv, *(f"{name}={value}" for name, value in env.items())]
    if any("\0" in part for part in parts):
        raise ValueError("a program's arguments and environment cannot hold NUL")
    content = b"\0".join(os.fsencode(part) for part in parts)
    return b"%d\n%b" % (len(content), content)


@contextmanager
def no_way_needed() -> Iterator[Entry]:
    """Enter a box that is no more than a process: start the keeper here."""
    yield Entry(KEEPER)


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""
