"""A child process whose end the event loop notices without a thread or task.

On Python 3.11, asyncio uses one thread for each child process: a thousand sandboxes would need a thousand threads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from envkit.types import Cause, CauseKind

_CHUNK_BYTES = 1 << 16
_KEPT_BYTES = 64 << 10
"""Number of bytes at the end of standard error that are kept."""
_KILL_S = 5.0
"""Seconds to wait for a process to end after SIGKILL. A process that is blocked in I/O may not end before."""


class Child:
    """A child process in a session of its own, so that Ctrl-C in the terminal does not reach it.

    `kill` kills the child's whole process group. When the child exits, the rest of the group is killed, too. Create a
    `Child` in the thread of a running event loop. When that thread ends, the kernel kills the child.

    Args:
        argv: Program and arguments.
        env: All environment variables of the child. It inherits none from this process.
        stream: Socket that becomes the child's standard input and output. The constructor closes it in this process.
        name: First argument (argv[0]) of the child, which process lists show; None means the path of the program.
        folder: Working directory of the child; None means that of this process.
        pass_fds: File descriptors that the child inherits.

    Attributes:
        pid: Process id.
        returncode: Exit code, or the negative signal number; None while the child runs.
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
        self._stderr_tail = bytearray()
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
        self._pidfd: int | None = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_end)
        os.set_blocking(self._stderr.fileno(), False)
        self._loop.add_reader(self._stderr.fileno(), self._on_output)

    def last_line(self) -> str:
        """Return the last non-blank line of the child's standard error (its last 300 characters); empty without one."""
        lines = self._stderr_tail.decode(errors="replace").split("\n")
        return next((line.strip()[-300:] for line in reversed(lines) if line.strip()), "")

    async def wait(self) -> None:
        """Wait until the child has ended."""
        await self._ended.wait()

    async def end(self, *, grace_s: float) -> None:
        """Wait up to `grace_s` seconds for the child to end, then kill it. Idempotent; cannot be cancelled."""
        with anyio.CancelScope(shield=True):
            if self.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    # Continue the child, because a process that SIGSTOP has stopped cannot exit.
                    os.killpg(self.pid, signal.SIGCONT)
            with anyio.move_on_after(grace_s):
                await self._ended.wait()
            if not self._ended.is_set():
                self.kill()
                with anyio.move_on_after(_KILL_S):
                    await self._ended.wait()
            if not self._ended.is_set():
                self._forget()

    def kill(self) -> None:
        """Kill the child's process group; idempotent."""
        if self.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _on_output(self) -> bool:
        """Read one chunk of the child's standard error; return whether there may be more to read."""
        try:
            chunk = os.read(self._stderr.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._stderr_tail += chunk
        del self._stderr_tail[:-_KEPT_BYTES]
        if chunk:
            return True
        self._loop.remove_reader(self._stderr.fileno())
        self._stderr.close()
        return False

    def _on_end(self) -> None:
        # Kill the group before `wait`, because afterwards the kernel may reuse the child's pid and process group id.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.returncode = self._process.wait()
        if not self._stderr.closed and self._on_output():
            # A pipe holds at most one more chunk. Another process might keep writing, so do not read until it is empty.
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


def cause_of(returncode: int | None, last_line: str) -> Cause:
    """Return the cause for the exit code of a sandbox's process 1. For a signal, the cause does not name the sender.

    A signal is a negative number, as in Popen, or 128 more than its number, as in a shell.
    """
    if returncode is None:
        return Cause(CauseKind.UNRESPONSIVE, "it does not answer")
    if returncode < 0 or 128 < returncode <= 192:
        number = -returncode if returncode < 0 else returncode - 128
        return Cause(CauseKind.KILLED, f"killed by signal {number}{_signal_name(number)}")
    detail = f": {last_line}" if returncode and last_line else ""
    return Cause(CauseKind.EXITED, f"exited with code {returncode}{detail}")


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""
