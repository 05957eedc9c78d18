"""A handle on process 1 of a sandbox, on the host whose kernel runs it: killing it ends the whole sandbox."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio

from .remount import reconfigure

_TERMINALS = 64
"""Terminals of one sandbox; the kernel has 3,072 for all sandboxes together."""


class FirstProcess:
    """Process 1 of a sandbox, held by file descriptors, since its pid may be reused.

    Args:
        pid: Its pid on the host.

    Raises:
        ProcessLookupError: It has exited.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handles = [os.pidfd_open(pid)]

    def folder(self, path: str) -> Path:
        """Return a host path by which to enter the folder `path` of the sandbox.

        It stays the same folder, with its file system's limits, until `close`.

        Raises:
            OSError: The process is gone, or there is no such folder.
        """
        self._handles.append(self._open(path))
        return Path(f"/proc/self/fd/{self._handles[-1]}")

    def remount(self, path: str, options: Mapping[str, str]) -> None:
        """Change the options of the file system mounted at `path` in the sandbox, see `remount.reconfigure`.

        Raises:
            OSError: The process has exited, nothing is mounted there, or the kernel refuses.
        """
        handle = self._open(path)
        try:
            reconfigure(Path(f"/proc/self/fd/{handle}"), options)
        finally:
            os.close(handle)

    def require_life(self) -> None:
        """Raise `ProcessLookupError` if it has exited."""
        signal.pidfd_send_signal(self._handles[0], 0)

    def chown(self, path: str, uid: int) -> None:
        """Make user and group `uid` of the sandbox the owners of its folder `path`.

        Raises:
            OSError: The process is gone, or there is no such folder.
        """
        owner = host_id(self.pid, uid)
        os.chown(self.folder(path), owner, owner)

    def limit_terminals(self, more: Mapping[str, str] | None = None) -> None:
        """Limit the sandbox to 64 terminals.

        Args:
            more: Further options of its ``/dev/pts`` to keep, such as ``{"gid": "5"}``; a remount resets all options.

        Raises:
            OSError: The process has exited, or the kernel is older than 5.2 or refuses; all sandboxes then share the
                kernel's limit.
        """
        options = {"newinstance": "", "max": str(_TERMINALS), "ptmxmode": "0666", "mode": "620", **(more or {})}
        self.remount("/dev/pts", options)

    def _open(self, path: str) -> int:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(f"/proc/{self.pid}/root{path}", flags)
        try:
            self.require_life()  # if it is alive now, the pid was not reused when the folder was opened
        except BaseException:
            os.close(handle)
            raise
        return handle

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal such as SIGSTOP."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
        except OSError:
            return False

    def kill(self) -> None:
        """Kill it, and so everything in the sandbox; safe to repeat."""
        if self._handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handles[0], signal.SIGKILL)

    async def wait(self) -> None:
        """Wait until it has exited; may be called concurrently."""
        if self._handles:
            handle = os.dup(self._handles[0])
            try:
                await anyio.wait_readable(handle)
            finally:
                os.close(handle)

    def close(self) -> None:
        """Close the descriptors; safe to repeat."""
        while self._handles:
            os.close(self._handles.pop())


def host_id(pid: int, inside: int) -> int:
    """Return the host's uid (and gid) of user `inside` in the user namespace of process `pid`.

    Raises:
        OSError: The process has exited.
        ValueError: Its user namespace has no such user.
    """
    for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines():
        first, outside, count = (int(part) for part in line.split())
        if first <= inside < first + count:
            return outside + inside - first
    raise ValueError(f"process {pid} has no user {inside}")
