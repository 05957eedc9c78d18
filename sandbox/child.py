"""A child process that the running event loop watches: no thread, no task.

The loop's own way on Python 3.11 is a thread for each child; a thousand boxes would be a thousand threads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import anyio

_CHUNK_BYTES = 1 << 16
_KILL_S = 5.0
"""Seconds until a process that ignores SIGKILL, because the kernel holds it, is left alone."""


class Tail:
    """The last `limit` bytes of what was written to it.

    Attributes:
        cut: Number of bytes that were dropped in front.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self.cut = 0

    def append(self, piece: bytes) -> None:
        self._kept += piece
        if (excess := len(self._kept) - self._limit) > 0:
            del self._kept[:excess]
            self.cut += excess

    def text(self) -> str:
        """What is kept, undecodable bytes replaced."""
        return self._kept.decode(errors="replace")

    def last_line(self) -> str:
        """The last line that is not blank, shortened to what fits into a message; empty when there is none."""
        lines = self.text().split("\n")
        return next((line.strip()[-300:] for line in reversed(lines) if line.strip()), "")


class Child:
    """A program in a session of its own, so that no signal of our terminal reaches it.

    It is killed together with its process group by `kill`, and what is left of the group when it ends is killed too.
    Must be made in the thread of a running event loop that stays: a kernel that is asked to end a child with its parent
    means the thread.

    Args:
        argv: Program and arguments.
        env: The whole environment.
        keep_bytes: How much of the end of standard output and of standard error is kept.
        life_line: Whether standard input is a pipe that ends with us (or by `let_go`) instead of an empty file.
        folder: Where it starts; None keeps ours.
        pass_fds: File descriptors that it inherits.

    Attributes:
        pid: Its process id.
        stdout: The end of what it wrote.
        stderr: Likewise for standard error.
        returncode: Exit code, negative for a signal; None while it runs.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        keep_bytes: int,
        life_line: bool = False,
        folder: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.stdout = Tail(keep_bytes)
        self.stderr = Tail(keep_bytes)
        self.returncode: int | None = None
        self._spoke = anyio.Event()
        self._ended = anyio.Event()
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if life_line else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            cwd=folder,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(self.pid) if sys.platform == "linux" else None
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._on_end)
        for stream, tail in self._outputs():
            os.set_blocking(stream.fileno(), False)
            self._loop.add_reader(stream.fileno(), self._on_output, stream, tail)
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)

    async def order(self, content: bytes) -> None:
        """Write `content` to the life line; a child that ends meanwhile shows itself by `wait`."""
        life_line = self._process.stdin
        while content and life_line is not None and not life_line.closed:
            try:
                content = content[os.write(life_line.fileno(), content) :]
            except BlockingIOError:  # an order of more than 64 KiB, and nobody who reads yet
                await anyio.sleep(0.002)
            except BrokenPipeError:
                return

    async def first_output(self) -> bool:
        """Wait until it writes to standard output; return whether it did before it ended."""
        await self._spoke.wait()
        if not self.stdout.text():
            await self._ended.wait()
        return bool(self.stdout.text())

    async def wait(self) -> int:
        """Wait until it has ended, and return its exit code, negative for a signal."""
        await self._ended.wait()
        return -signal.SIGKILL if self.returncode is None else self.returncode

    def let_go(self) -> None:
        """End the life line; safe to repeat."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill its process group; safe to repeat."""
        if self.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self, gently: Callable[[], None], *, grace_s: float) -> None:
        """Ask it to end by calling `gently`, kill it after `grace_s` seconds; safe to repeat, and not cancelled."""
        with anyio.CancelScope(shield=True):
            if not self._ended.is_set():
                gently()
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGCONT)  # who was stopped could not end gently
                with anyio.move_on_after(grace_s):
                    await self._ended.wait()
            if not self._ended.is_set():
                self.kill()
                with anyio.move_on_after(_KILL_S):
                    await self._ended.wait()
            if not self._ended.is_set():
                self._forget()

    def _outputs(self) -> list[tuple[IO[bytes], Tail]]:
        both = [(self._process.stdout, self.stdout), (self._process.stderr, self.stderr)]
        return [(stream, tail) for stream, tail in both if stream is not None and not stream.closed]

    def _on_output(self, stream: IO[bytes], tail: Tail) -> bool:
        """Take one piece in; return whether there may be more."""
        try:
            piece = os.read(stream.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        tail.append(piece)
        if tail is self.stdout:
            self._spoke.set()
        if piece:
            return True
        self._loop.remove_reader(stream.fileno())
        stream.close()
        if tail is self.stdout and sys.platform != "linux":  # without pidfds the end is seen by this
            self._on_end()
        return False

    def _on_end(self) -> None:
        # Until it is waited for, its id, and with it the group's, belongs to nobody else.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.returncode = self._process.wait()
        for stream, tail in self._outputs():
            # A pipe holds one chunk; whoever still fills it is not read for ever.
            if self._on_output(stream, tail):
                self._on_output(stream, tail)
        self._forget()

    def _forget(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        for stream, _ in self._outputs():
            self._loop.remove_reader(stream.fileno())
            stream.close()
        self.let_go()
        self._spoke.set()
        self._ended.set()
