"""Runs a program in a sandbox with the standard input, output and terminal of this process."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from pathlib import Path

import anyio
import anyio.lowlevel

from envkit import clock
from envkit.cli.tables import echo
from envkit.errors import SandboxLostError, UsageError
from envkit.protocols import Program, Sandbox
from envkit.types import ExecResult

TIMED_OUT = 124
LOST = 125
_IN, _OUT, _ERR = range(3)
_SHELL = ("bash", "-i")
_PLAIN_SHELL = ("sh",)


async def run_attached(
    opened: AbstractAsyncContextManager[Sandbox],
    program: Sequence[str],
    uploads: Sequence[tuple[Path, str]] = (),
    *,
    timeout_s: float,
    tty: bool,
) -> int:
    """Run a program with this process's standard streams and terminal; return the code to exit this process with.

    `uploads` are copied in first. Without a program, a shell is started, which also gets a terminal (`tty`) if this
    process has one.
    """
    number = 0

    async def cancel_on_signal() -> None:
        nonlocal number
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
            async for received in signals:
                number = number or received
                scope.cancel()

    with anyio.CancelScope() as scope:
        try:
            async with clock.background_tasks() as tasks:
                tasks.start_soon(cancel_on_signal)
                async with opened as sandbox:
                    for source, name in uploads:
                        await sandbox.upload(source, name)
                    return await _run(sandbox, program, timeout_s, tty)
        except SandboxLostError as error:
            echo(error, err=True)
            return LOST
    return 128 + number


async def _run(sandbox: Sandbox, program: Sequence[str], timeout_s: float, tty: bool) -> int:
    on_terminal = os.isatty(_IN) and os.isatty(_OUT)
    if tty and not on_terminal:
        raise UsageError("--tty: standard input and output are not a terminal; leave out --tty")
    if not program:
        tty = tty or on_terminal
        program = _SHELL if tty else _PLAIN_SHELL
    env = {"TERM": os.environ.get("TERM", "xterm")} if tty else {}
    async with sandbox.program(program, timeout_s=timeout_s, env=env, terminal=_size() if tty else None) as process:
        with _raw_terminal() if tty else nullcontext():
            async with clock.background_tasks() as tasks:
                tasks.start_soon(_feed, process)
                if tty:
                    tasks.start_soon(_follow_size, process)
                while (piece := await process.receive()) is not None:
                    kind, content = piece
                    await clock.to_thread(_write, _ERR if kind == "err" else _OUT, content)
        result = await process.result()
    return _print_result(result, timeout_s)


async def _feed(program: Program) -> None:
    """Send the standard input of this process to the program."""
    while True:
        try:
            await anyio.wait_readable(_IN)
        except OSError:
            # Standard input is a file. The event loop cannot wait for files, but they are always readable.
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


def _print_result(result: ExecResult, timeout_s: float) -> int:
    """Print the output in `result`, and return the code to exit this process with."""
    _write(_OUT, result.stdout_bytes)
    _write(_ERR, result.stderr_bytes)
    if result.timed_out:
        echo(f"stopped after {timeout_s:g} s", err=True)
    if (code := result.exit_code) is None:
        return TIMED_OUT
    return 128 - code if code < 0 else code
