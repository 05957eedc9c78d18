"""A handle with which the host controls process 1 of a sandbox. If process 1 is killed, the whole sandbox ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import anyio

from .remount import enter_and_mount, reconfigure

_TERMINALS = 64
"""Maximum number of terminals per sandbox. By default the kernel allows 3,072 for all sandboxes together."""


class FirstProcess:
    """Process 1 of a sandbox. It is held by file descriptors, because the kernel may reuse the pid after its end.

    Raises:
        ProcessLookupError: The process has exited.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handles = [os.pidfd_open(pid)]

    def folder(self, path: str) -> Path:
        """Return a path of the host that leads to the folder `path` of the sandbox.

        The returned path is valid until `close`, even if the process exits.

        Raises:
            OSError: The process has exited, or there is no such folder.
        """
        self._handles.append(self._open(path))
        return Path(f"/proc/self/fd/{self._handles[-1]}")

    def remount(self, path: str, options: Mapping[str, str]) -> None:
        """Change mount options of the file system at `path` in the sandbox; see `remount.reconfigure`.

        Raises:
            OSError: The process has exited, nothing is mounted at `path`, or the kernel refuses.
        """
        handle = self._open(path)
        try:
            reconfigure(Path(f"/proc/self/fd/{handle}"), options)
        finally:
            os.close(handle)

    def require_life(self) -> None:
        """Raise `ProcessLookupError` if the process has exited."""
        signal.pidfd_send_signal(self._handles[0], 0)

    def lend(self, more: Mapping[str, str]) -> None:
        """Make files writable, by bind mounts, in a container whose ``/proc`` and cgroups are otherwise read-only.

        One is the ``oom_score_adj`` of process 1, which its children inherit. Other processes in the container cannot
        lower their scores.

        Args:
            more: Further files: the path on the host of each, and its path in the container.

        Raises:
            OSError: The kernel does not support or refuses the system calls, or the process has exited.
        """
        # Use a new thread, which ends afterwards: a thread cannot leave the mount namespace that it has entered.
        with ThreadPoolExecutor(1) as thread:
            files = {f"/proc/{self.pid}/oom_score_adj": "/proc/1/oom_score_adj", **more}
            thread.submit(enter_and_mount, self.pid, self.require_life, files).result()

    def chown(self, path: str, uid: int) -> None:
        """Make the sandbox's user `uid`, and the group with the same number, the owner of the sandbox's folder `path`.

        Raises:
            OSError: The process has exited, or there is no such folder.
        """
        owner = _host_id(self.pid, uid)
        os.chown(self.folder(path), owner, owner)

    def limit_terminals(self, more: Mapping[str, str] | None = None) -> None:
        """Limit the sandbox to 64 terminals.

        Args:
            more: Further mount options of ``/dev/pts``, such as ``{"gid": "5"}``. All other options are reset.

        Raises:
            OSError: The process has exited, or the kernel refuses or is older than 5.2.
        """
        options = {"newinstance": "", "max": str(_TERMINALS), "ptmxmode": "0666", "mode": "620", **(more or {})}
        self.remount("/dev/pts", options)

    def _open(self, path: str) -> int:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(f"/proc/{self.pid}/root{path}", flags)
        try:
            self.require_life()  # if process 1 still runs, its pid was not reused when the folder was opened
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
        """Kill the process, which ends the whole sandbox; idempotent."""
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
        """Close the file descriptors; idempotent."""
        while self._handles:
            os.close(self._handles.pop())


def _host_id(pid: int, inside: int) -> int:
    """Return the host's uid (and gid) to which the user namespace of process `pid` maps its uid `inside`.

    Raises:
        OSError: The process has exited.
        ValueError: The user namespace does not map this uid.
    """
    for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines():
        first, outside, count = (int(part) for part in line.split())
        if first <= inside < first + count:
            return outside + inside - first
    raise ValueError(f"the user namespace of process {pid} does not map uid {inside}")
