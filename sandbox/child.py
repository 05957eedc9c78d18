"""A child process that the running event loop watches: no thread, no task.

The loop's own way on Python 3.11 is a thread for each child; a thousand boxes would be a thousand threads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

_CHUNK_BYTES = 1 << 16
_KEPT_BYTES = 64 << 10
"""How much of the end of standard error is kept."""
_KILL_S = 5.0
"""Seconds until a process that ignores SIGKILL, because the kernel holds it, is left alone."""
OUT_OF_MEMORY_CODE = 160
"""Exit code of an agent whose command was killed for want of memory: that of a signal which no program dies of."""


class Child:
    """A program in a session of its own, so that no signal of our terminal reaches it.

    It is killed together with its process group by `kill`, and what is left of the group when it ends is killed too.
    Must be made in the thread of a running event loop that stays: a kernel that is asked to end a child with its parent
    means the thread.

    Args:
        argv: Program and arguments.
        env: The whole environment.
        stream: Becomes its standard input and output; closed here.
        name: What it is called among processes; None is the program.
        folder: Where it starts; None keeps ours.
        pass_fds: File descriptors that it inherits.

    Attributes:
        pid: Its process id.
        returncode: Exit code, negative for a signal; None while it runs.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stream: socket.socket,
        name: str | None = None,
        folder: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.returncode: int | None = None
        self._said = bytearray()
        self._ended = anyio.Event()
        with stream:
            self._process = subprocess.Popen(
                [name or argv[0], *argv[1:]],
                executable=argv[0],
                stdin=stream.fileno(),
                stdout=stream.fileno(),
                stderr=subprocess.PIPE,
                bufsize=0,
                env=env,
                cwd=folder,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        assert self._process.stderr is not None
        self._stderr = self._process.stderr
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(self.pid) if sys.platform == "linux" else None
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._on_end)
        os.set_blocking(self._stderr.fileno(), False)
        self._loop.add_reader(self._stderr.fileno(), self._on_output)

    def last_line(self) -> str:
        """The last line of standard error that is not blank, shortened to what fits into a message; may be empty."""
        lines = self._said.decode(errors="replace").split("\n")
        return next((line.strip()[-300:] for line in reversed(lines) if line.strip()), "")

    async def wait(self) -> None:
        """Wait until it has ended."""
        await self._ended.wait()

    async def end(self, *, grace_s: float) -> None:
        """Wait until it has ended, for `grace_s` seconds, then kill it; safe to repeat, and not cancelled."""
        with anyio.CancelScope(shield=True):
            if self.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGCONT)  # who is stopped could not end by itself
            with anyio.move_on_after(grace_s):
                await self._ended.wait()
            if not self._ended.is_set():
                self.kill()
                with anyio.move_on_after(_KILL_S):
                    await self._ended.wait()
            if not self._ended.is_set():
                self._forget()

    def kill(self) -> None:
        """Kill its process group; safe to repeat."""
        if self.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _on_output(self) -> bool:
        """Take one piece in; return whether there may be more."""
        try:
            piece = os.read(self._stderr.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._said += piece
        del self._said[:-_KEPT_BYTES]
        if piece:
            return True
        self._loop.remove_reader(self._stderr.fileno())
        self._stderr.close()
        if sys.platform != "linux":  # without pidfds the end is seen by this
            self._on_end()
        return False

    def _on_end(self) -> None:
        # Until it is waited for, its id, and with it the group's, belongs to nobody else.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.returncode = self._process.wait()
        if not self._stderr.closed and self._on_output():
            # A pipe holds one chunk; whoever still fills it is not read for ever.
            self._on_output()
        self._forget()

    def _forget(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if not self._stderr.closed:
            self._loop.remove_reader(self._stderr.fileno())
            self._stderr.close()
        self._ended.set()


def cause_of(returncode: int | None, last_line: str) -> str:
    """Say in one line how a process ended.

    Args:
        returncode: Exit code, negative for a signal; None if it has not ended.
        last_line: What it wrote last.
    """
    if returncode is None:
        return "it does not answer"
    if returncode < 0:
        return f"killed by signal {-returncode}{_signal_name(-returncode)}"
    return f"exited with code {returncode}{f': {last_line}' if returncode and last_line else ''}"


def signal_in(code: int | None) -> int | None:
    """Return the exit code that a shell or an agent gave for another process: 128 and more stand for a signal."""
    return 128 - code if code is not None and 128 < code <= 192 else code


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""
