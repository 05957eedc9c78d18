"""``envkit sandbox`` on this machine: runs programs in sandboxes, with the input and terminal of this process."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from envkit import clock
from envkit.errors import EnvkitError, SandboxLostError, UnsupportedError, UsageError
from envkit.protocols import InteractiveSandbox, Program
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.bubblewrap import backend as bubblewrap
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker import backend as docker
from envkit.sandbox.docker.backend import DockerBackend
from envkit.types import JSON, ExecResult
from envkit.wiring.sandboxes import running_servers
from envkit.wiring.sandboxes.backends import BackendKind
from envkit.wiring.sandboxes.blocking import AnySandbox, kind_of, opened, running, spec_of
from envkit.wiring.sandboxes.running_servers import ServerNote

UPLOADS_AFTER_START = (
    "--upload: with --detach the program would start before the upload; leave the program out, then run it with exec"
)
TIMED_OUT = 124
LOST = 125
_IN, _OUT, _ERR = range(3)
_FOR_EVER_S = 10 * 365 * 86400.0
_SHELL = ("bash", "-i")
_PLAIN_SHELL = ("sh",)
_NO_OWNER: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class DetachedSandbox:
    """What `envkit sandbox` lists about a detached sandbox, which outlives the command that started it.

    Attributes:
        id: Its id.
        stats: See `envkit.sandbox.agent_client.sandbox.AgentSandbox.stats`; empty if the sandbox does not answer.
        problem: Why the sandbox does not answer, in one line; empty if it answers.
        owner: Process, address and ledger of the server that started the sandbox; empty if a person started it.
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
    """Run a program (a shell if `program` is empty) in a new sandbox; return the exit code to exit with."""
    spec = spec_of(options)

    async def run() -> int:
        async with opened(kind) as backend, running(backend, spec) as sandbox:
            for source, name in uploads:
                await sandbox.upload(source, name)
            return await run_attached(sandbox, program, timeout_s, tty)

    return await exit_code_of(run)


async def detach(
    kind: BackendKind,
    options: Mapping[str, Any],
    program: Sequence[str],
    uploads: Sequence[tuple[Path, str]],
    report_id: Callable[[str], None],
) -> None:
    """Start a detached sandbox that runs `program`, and report its id."""
    if uploads and program:
        raise UsageError(UPLOADS_AFTER_START)
    spec = spec_of({**options, "command": program})
    async with opened(kind) as backend:
        sandbox = await backend.start(spec)
        try:
            for source, name in uploads:
                await sandbox.upload(source, name)
        except BaseException:
            await sandbox.stop()
            raise
        report_id(sandbox.id)


async def exec_in(sandbox_id: str, program: Sequence[str], timeout_s: float | None, tty: bool) -> int:
    """Run a program (a shell if `program` is empty) in a detached sandbox; return the exit code to exit with."""

    async def run() -> int:
        async with _attached(sandbox_id) as sandbox:
            return await run_attached(sandbox, program, timeout_s, tty)

    return await exit_code_of(run)


async def log_of(sandbox_id: str) -> str:
    """Return the last standard error output of a detached sandbox's program."""
    async with _attached(sandbox_id) as sandbox:
        return await sandbox.log()


async def remove(sandbox_ids: Sequence[str]) -> None:
    """Stop detached sandboxes. If one fails, the others are still stopped.

    Raises:
        ExceptionGroup: The failures.
    """
    failures = []
    for sandbox_id in sandbox_ids:
        try:
            async with _backend_of(sandbox_id) as backend:
                await backend.remove(sandbox_id)
        except EnvkitError as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup("cannot end sandboxes", failures)


def print_result(result: ExecResult, timeout_s: float) -> int:
    """Print a program's remaining output, and return the exit code for this process.

    Args:
        result: Result of the program.
        timeout_s: Timeout of the program in seconds, for the message after a timeout.
    """
    _write(_OUT, result.stdout_bytes)
    _write(_ERR, result.stderr_bytes)
    if result.timed_out:
        print(f"stopped after {timeout_s:g} s", file=sys.stderr)
    return _exit_code(result.exit_code)


async def list_detached_sandboxes(*, with_servers: bool, warn: Callable[[str], None]) -> Sequence[DetachedSandbox]:
    """Return the detached sandboxes of this machine, of every backend that works here.

    Args:
        with_servers: Whether to include the sandboxes of servers.
        warn: Called with one line about each backend that is skipped.
    """
    found: list[DetachedSandbox] = []
    if bubblewrap.why_unavailable() is None:
        async with LocalBackend() as backend:
            found += await _detached(backend, with_servers)
    if (why := await docker.why_unavailable()) is None:
        async with DockerBackend() as backend:
            found += await _detached(backend, with_servers)
    else:
        warn(f"docker was left out: {why}")
    return found


async def _detached(backend: LocalBackend | DockerBackend, with_servers: bool) -> Sequence[DetachedSandbox]:
    owners = dict.fromkeys(await backend.list_detached(""), _NO_OWNER)
    if with_servers:
        for note in running_servers.known():
            owners |= dict.fromkeys(await backend.list_detached(note.ledger_id), _owner(note))
        owners = dict.fromkeys(await backend.list_detached(), ("of an unknown server",)) | owners
    return [await _inspect(backend, sandbox_id, owner) for sandbox_id, owner in sorted(owners.items())]


def _owner(note: ServerNote) -> Sequence[str]:
    return f"of server {note.pid}{', which has ended' if note.is_gone() else ''}", note.address, note.ledger


async def _inspect(backend: LocalBackend | DockerBackend, sandbox_id: str, owner: Sequence[str]) -> DetachedSandbox:
    try:
        sandbox = await backend.attach(sandbox_id, as_observer=True)
        stats = await sandbox.stats()
        await sandbox.release()
    except EnvkitError as error:
        return DetachedSandbox(sandbox_id, {}, str(error), owner)
    return DetachedSandbox(sandbox_id, stats, owner=owner)


async def exit_code_of(run: Callable[[], Awaitable[int]]) -> int:
    """Await `run` and return its exit code, or the code for a lost sandbox or for a signal that stopped `run`."""
    caught: list[int] = []

    async def listen() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
            async for number in signals:
                caught.append(number)
                scope.cancel()

    with anyio.CancelScope() as scope:
        try:
            async with _background([listen]):
                return await run()
        except SandboxLostError as error:
            print(error, file=sys.stderr)
            return LOST
    return 128 + caught[0]


@asynccontextmanager
async def _attached(sandbox_id: str) -> AsyncIterator[AgentSandbox]:
    async with _backend_of(sandbox_id) as backend:
        yield await backend.attach(sandbox_id)


@asynccontextmanager
async def _backend_of(sandbox_id: str) -> AsyncIterator[LocalBackend | DockerBackend]:
    """Open the backend that created the sandbox with this id."""
    async with opened(kind_of(sandbox_id)) as backend:
        assert isinstance(backend, (LocalBackend, DockerBackend))
        yield backend


async def run_attached(sandbox: AnySandbox, program: Sequence[str], timeout_s: float | None, tty: bool) -> int:
    """Run a program with the standard input, output and terminal of this process."""
    on_terminal = os.isatty(_IN) and os.isatty(_OUT)
    if tty and not on_terminal:
        raise UsageError("--tty: standard input and output are not a terminal; leave out --tty")
    if not program:
        tty = tty or on_terminal
        program = _SHELL if tty else _PLAIN_SHELL
    timeout_s = _FOR_EVER_S if timeout_s is None else timeout_s
    if isinstance(sandbox, InteractiveSandbox):
        with suppress(UnsupportedError):
            return await _run_interactively(sandbox, program, timeout_s, tty)
    # Without Python in the image, no agent can stream the output, so print it when the program ends.
    return print_result(await sandbox.exec(program, timeout_s=timeout_s), timeout_s)


async def _run_interactively(sandbox: InteractiveSandbox, program: Sequence[str], timeout_s: float, tty: bool) -> int:
    env = {"TERM": os.environ.get("TERM", "xterm")} if tty else {}
    async with sandbox.program(program, timeout_s=timeout_s, env=env, terminal=_size() if tty else None) as process:
        tasks = [partial(_feed, process), *([partial(_follow_size, process)] if tty else ())]
        with _raw_terminal() if tty else nullcontext():
            async with _background(tasks):
                while (piece := await process.receive()) is not None:
                    kind, content = piece
                    await clock.to_thread(_write, _ERR if kind == "err" else _OUT, content)
        result = await process.result()
    return print_result(result, timeout_s)


@asynccontextmanager
async def _background(tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> AsyncIterator[None]:
    """Run `tasks` during the block. An error of the block is raised directly, not in an exception group."""
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
    """Send the standard input of this process to the program."""
    while True:
        try:
            await anyio.wait_readable(_IN)
        except OSError:
            # The event loop cannot wait for a file, which is always readable.
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
    """Send every key to the sandbox, including Ctrl-C."""
    import termios
    import tty

    before = termios.tcgetattr(_IN)
    tty.setraw(_IN, termios.TCSADRAIN)  # TCSADRAIN keeps the keys that were typed before this call
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
