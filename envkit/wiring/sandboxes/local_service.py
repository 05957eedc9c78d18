"""What ``envkit sandbox`` does: programs in boxes with our own standard input, output and terminal."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from envkit import clock
from envkit.errors import EnvkitError, SandboxLostError, UsageError
from envkit.sandbox.agent_client.process import Program
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.bubblewrap import backend as bubblewrap
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker import backend as docker
from envkit.sandbox.docker.backend import DockerBackend
from envkit.types import JSON, ExecResult
from envkit.wiring.sandboxes import running_servers
from envkit.wiring.sandboxes.blocking import AnySandbox, BackendKind, kind_of, opened, running, spec_of
from envkit.wiring.sandboxes.running_servers import ServerNote

TIMED_OUT = 124
LOST = 125
_IN, _OUT, _ERR = range(3)
_FOR_EVER_S = 10 * 365 * 86400.0
_SHELL = ("bash", "-i")
_PLAIN_SHELL = ("sh",)
_NOBODY: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class DetachedSandbox:
    """A box that stays.

    Attributes:
        id: Its id.
        stats: As `envkit.sandbox.agent_client.sandbox.Box.stats`; empty when it does not answer.
        problem: Why it does not, in one line.
        owner: Which server started it, which has it still or comes back to it; empty for one that a person started.
    """

    id: str
    stats: Mapping[str, JSON]
    problem: str = ""
    owner: Sequence[str] = ()


async def run(
    kind: BackendKind,
    options: Mapping[str, Any],
    program: Sequence[str],
    uploads: Sequence[tuple[Path, str]],
    timeout_s: float | None,
    tty: bool,
) -> int:
    """Run a program in a new box and return the exit code to end with; without a program, a shell."""
    spec = spec_of(options)

    async def run() -> int:
        async with opened(kind) as backend, running(backend, spec) as box:
            for source, name in uploads:
                await box.upload(source, name)
            return await _attend(box, program, timeout_s, tty)

    return await exit_code_of(run)


async def detach(
    kind: BackendKind,
    options: Mapping[str, Any],
    program: Sequence[str],
    uploads: Sequence[tuple[Path, str]],
    say: Callable[[str], None],
) -> None:
    """Leave a box running in which `program` runs, and say its id."""
    if uploads and program:
        raise UsageError("--upload goes with --detach only without a program, which would start before: use exec then")
    spec = spec_of({**options, "command": program})
    async with opened(kind) as backend:
        box = await backend.start(spec)
        try:
            for source, name in uploads:
                await box.upload(source, name)
        except BaseException:
            await box.stop()
            raise
        say(box.id)


async def exec_in(sandbox_id: str, program: Sequence[str], timeout_s: float | None, tty: bool) -> int:
    """Run a program in a box that stays and return the exit code to end with; without a program, a shell."""

    async def run() -> int:
        async with _attached(sandbox_id) as box:
            return await _attend(box, program, timeout_s, tty)

    return await exit_code_of(run)


async def log_of(sandbox_id: str) -> str:
    """Return the end of what the program of a box that stays wrote to standard error."""
    async with _attached(sandbox_id) as box:
        return await box.log()


async def remove(sandbox_ids: Sequence[str]) -> None:
    """End boxes that stay; those that cannot be ended do not keep the others from it.

    Raises:
        ExceptionGroup: Of what went wrong.
    """
    failures = []
    for sandbox_id in sandbox_ids:
        try:
            async with _keeper(sandbox_id) as backend:
                await backend.remove(sandbox_id)
        except EnvkitError as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup("boxes that could not be ended", failures)


def say(result: ExecResult, bound_s: float) -> int:
    """Write what a program has left to say, which was given `bound_s` seconds; return the exit code to end with."""
    _write(_OUT, result.stdout_bytes)
    _write(_ERR, result.stderr_bytes)
    if result.timed_out:
        print(f"stopped after {bound_s:g} s", file=sys.stderr)
    return _exit_code(result.exit_code)


async def list_staying(*, with_servers: bool, warn: Callable[[str], None]) -> Sequence[DetachedSandbox]:
    """Return the boxes of this machine that stay, of every backend that works here.

    Args:
        with_servers: Also those that servers have started.
        warn: Called with a line about what was left out.
    """
    found: list[DetachedSandbox] = []
    if bubblewrap.why_unavailable() is None:
        async with LocalBackend() as backend:
            found += await _staying(backend, with_servers)
    if (why := await docker.why_unavailable()) is None:
        async with DockerBackend() as backend:
            found += await _staying(backend, with_servers)
    else:
        warn(f"docker was left out: {why}")
    return found


async def _staying(backend: LocalBackend | DockerBackend, with_servers: bool) -> Sequence[DetachedSandbox]:
    owners = dict.fromkeys(await backend.staying(""), _NOBODY)
    if with_servers:
        for note in running_servers.known():
            owners |= dict.fromkeys(await backend.staying(note.ledger_id), _words(note))
        owners = dict.fromkeys(await backend.staying(), ("of an unknown server",)) | owners
    return [await _look(backend, sandbox_id, owner) for sandbox_id, owner in sorted(owners.items())]


def _words(note: ServerNote) -> Sequence[str]:
    return f"of server {note.pid}{', which is gone' if note.is_gone() else ''}", note.address, note.ledger


async def _look(backend: LocalBackend | DockerBackend, sandbox_id: str, owner: Sequence[str]) -> DetachedSandbox:
    try:
        box = await backend.attach(sandbox_id, observes=True)
        stats = await box.stats()
        await box.release()
    except EnvkitError as error:
        return DetachedSandbox(sandbox_id, {}, str(error), owner)
    return DetachedSandbox(sandbox_id, stats, owner=owner)


async def exit_code_of(run: Callable[[], Awaitable[int]]) -> int:
    """Return what `run` returns, or the exit code for a lost box, or for a signal that ended it, in order."""
    caught: list[int] = []

    async def listen() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
            async for number in signals:
                caught.append(number)
                scope.cancel()

    with anyio.CancelScope() as scope:
        try:
            async with _beside([listen]):
                return await run()
        except SandboxLostError as error:
            print(error, file=sys.stderr)
            return LOST
    return 128 + caught[0]


@asynccontextmanager
async def _attached(sandbox_id: str) -> AsyncIterator[AgentSandbox]:
    async with _keeper(sandbox_id) as backend:
        yield await backend.attach(sandbox_id)


@asynccontextmanager
async def _keeper(sandbox_id: str) -> AsyncIterator[LocalBackend | DockerBackend]:
    """Give the backend that a box of this id would be of."""
    async with opened(kind_of(sandbox_id)) as backend:
        assert isinstance(backend, (LocalBackend, DockerBackend))
        yield backend


async def _attend(box: AnySandbox, program: Sequence[str], timeout_s: float | None, tty: bool) -> int:
    """Run a program with our standard input, output and terminal."""
    on_terminal = os.isatty(_IN) and os.isatty(_OUT)
    if tty and not on_terminal:
        raise UsageError("--tty: standard input and output are no terminal")
    if not program:
        tty = tty or on_terminal
        program = _SHELL if tty else _PLAIN_SHELL
    bound_s = _FOR_EVER_S if timeout_s is None else timeout_s
    if not isinstance(box, AgentSandbox):  # an image without Python: nothing is seen before the program ends
        return say(await box.exec(program, timeout_s=bound_s), bound_s)
    env = {"TERM": os.environ.get("TERM", "xterm")} if tty else {}
    async with box.program(program, timeout_s=bound_s, env=env, terminal=_size() if tty else None) as running_one:
        beside = [partial(_feed, running_one), *([partial(_follow_size, running_one)] if tty else ())]
        with _raw_terminal() if tty else nullcontext():
            async with _beside(beside):
                while (piece := await running_one.receive()) is not None:
                    kind, content = piece
                    await clock.to_thread(_write, _ERR if kind == "err" else _OUT, content)
        result = await running_one.result()
    return say(result, bound_s)


@asynccontextmanager
async def _beside(tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> AsyncIterator[None]:
    """Have `tasks` run during the block; an error of the block is raised as it is, not in a group."""
    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(task)
        try:
            yield
        except Exception as error:
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _feed(program: Program) -> None:
    """Send our standard input."""
    while True:
        try:
            await anyio.wait_readable(_IN)
        except OSError:  # a file is always readable, which the loop does not know
            await anyio.lowlevel.checkpoint()
        if not (content := os.read(_IN, 1 << 16)):
            break
        await program.send(content)
    await program.send_eof()


async def _follow_size(program: Program) -> None:
    with anyio.open_signal_receiver(signal.SIGWINCH) as signals:
        async for _ in signals:
            await program.resize(*_size())


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size()
    return size.lines, size.columns


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Let every key go to the box, Ctrl-C among them."""
    import termios
    import tty

    before = termios.tcgetattr(_IN)
    tty.setraw(_IN, termios.TCSADRAIN)  # what was typed before is for the program
    try:
        yield
    finally:
        termios.tcsetattr(_IN, termios.TCSADRAIN, before)


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _exit_code(code: int | None) -> int:
    if code is None:
        return TIMED_OUT
    return 128 - code if code < 0 else code
