"""A handle to process 1 of a sandbox, seen from the host. Killing process 1 ends the whole sandbox."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio

from .remount import reconfigure

_TERMINALS = 64
"""Maximum number of terminals per sandbox; the kernel allows 3,072 for all sandboxes together."""


class FirstProcess:
    """Process 1 of a sandbox. It is referenced by file descriptors, because the kernel may reuse its pid.

    Args:
        pid: Pid on the host.

    Raises:
        ProcessLookupError: The process has exited.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handles = [os.pidfd_open(pid)]

    def folder(self, path: str) -> Path:
        """Return a host path to the sandbox's folder `path`.

        The host path leads to this folder until `close`, even if the process exits.

        Raises:
            OSError: The process has exited, or there is no such folder.
        """
        self._handles.append(self._open(path))
        return Path(f"/proc/self/fd/{self._handles[-1]}")

    def remount(self, path: str, options: Mapping[str, str]) -> None:
        """Change mount options of the file system at `path` in the sandbox; see `remount.reconfigure`.

        Raises:
            OSError: The process has exited, nothing is mounted there, or the kernel refuses.
        """
        handle = self._open(path)
        try:
            reconfigure(Path(f"/proc/self/fd/{handle}"), options)
        finally:
            os.close(handle)

    def require_life(self) -> None:
        """Raise `ProcessLookupError` if the process has exited."""
        signal.pidfd_send_signal(self._handles[0], 0)

    def chown(self, path: str, uid: int) -> None:
        """Make the sandbox's user `uid`, and the group with the same number, own the sandbox's folder `path`.

        Raises:
            OSError: The process has exited, or there is no such folder.
        """
        owner = host_id(self.pid, uid)
        os.chown(self.folder(path), owner, owner)

    def limit_terminals(self, more: Mapping[str, str] | None = None) -> None:
        """Limit the sandbox to 64 terminals.

        Args:
            more: Other mount options of ``/dev/pts``, such as ``{"gid": "5"}``; options that are not named are reset.

        Raises:
            OSError: The process has exited, the kernel is older than 5.2, or it refuses.
        """
        options = {"newinstance": "", "max": str(_TERMINALS), "ptmxmode": "0666", "mode": "620", **(more or {})}
        self.remount("/dev/pts", options)

    def _open(self, path: str) -> int:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(f"/proc/{self.pid}/root{path}", flags)
        try:
            self.require_life()  # the process is still alive, so its pid was not reused when the folder was opened
        except BaseException:
            os.close(handle)
            raise
        return handle

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped the process."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the process, which ends the whole sandbox; may be called again."""
        if self._handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handles[0], signal.SIGKILL)

    async def wait(self) -> None:
        """Wait until the process has exited; may be called concurrently."""
        if self._handles:
            handle = os.dup(self._handles[0])
            try:
                await anyio.wait_readable(handle)
            finally:
                os.close(handle)

    def close(self) -> None:
        """Close the file descriptors; may be called again."""
        while self._handles:
            os.close(self._handles.pop())


def host_id(pid: int, inside: int) -> int:
    """Return the host uid (and gid) that uid `inside` has in the user namespace of process `pid`.

    Raises:
        OSError: The process has exited.
        ValueError: The user namespace does not map this uid.
    """
    for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines():
        first, outside, count = (int(part) for part in line.split())
        if first <= inside < first + count:
            return outside + inside - first
    raise ValueError(f"process {pid} has no user {inside}")
