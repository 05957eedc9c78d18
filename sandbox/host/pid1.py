"""A hold on the first process of a box, seen from the host of its kernel: end it and everything is ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio

from .remount import reconfigure

_TERMINALS = 64
"""How many a sandbox may have at once; the kernel has 3,072 for all of them together."""


class FirstProcess:
    """Process 1 of a box, held by descriptors, since its number may come to mean another process.

    Args:
        pid: Its number on the host.

    Raises:
        ProcessLookupError: It is gone.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handles = [os.pidfd_open(pid)]

    def folder(self, place: str) -> Path:
        """Return a name by which the host enters the folder `place` of the box.

        It stays the same folder, in the memory of the box and with the bounds of it, until `close`.

        Raises:
            OSError: The process is gone, or there is no such folder.
        """
        self._handles.append(self._open(place))
        return Path(f"/proc/self/fd/{self._handles[-1]}")

    def remount(self, place: str, options: Mapping[str, str]) -> None:
        """Give the file system that the box has mounted at `place` other options, as `remount.reconfigure`.

        Raises:
            OSError: The process is gone, there is no such mount, or the kernel refuses.
        """
        handle = self._open(place)
        try:
            reconfigure(Path(f"/proc/self/fd/{handle}"), options)
        finally:
            os.close(handle)

    def require_life(self) -> None:
        """Raise `ProcessLookupError` if it is gone."""
        signal.pidfd_send_signal(self._handles[0], 0)

    def give(self, place: str, uid: int) -> None:
        """Make user and group `uid`, as numbered inside, the owners of the folder `place` of the box.

        Raises:
            OSError: The process is gone, or there is no such folder.
        """
        owner = host_id(self.pid, uid)
        os.chown(self.folder(place), owner, owner)

    def bound_terminals(self, more: Mapping[str, str] | None = None) -> None:
        """Let the box have 64 terminals at once.

        Args:
            more: Further options of its ``/dev/pts``, such as ``{"gid": "5"}``, which would be reset otherwise.

        Raises:
            OSError: The process is gone, or the kernel is older than 5.2 or refuses; then all boxes share one bound.
        """
        options = {"newinstance": "", "max": str(_TERMINALS), "ptmxmode": "0666", "mode": "620", **(more or {})}
        self.remount("/dev/pts", options)

    def _open(self, place: str) -> int:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(f"/proc/{self.pid}/root{place}", flags)
        try:
            self.require_life()  # now the number was its own when the folder was opened
        except BaseException:
            os.close(handle)
            raise
        return handle

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP holds it up."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
        except OSError:
            return False

    def kill(self) -> None:
        """Kill it, and with it everything in the box; safe to repeat."""
        if self._handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handles[0], signal.SIGKILL)

    async def wait(self) -> None:
        """Wait until it has ended; many may wait at once."""
        if self._handles:
            handle = os.dup(self._handles[0])
            try:
                await anyio.wait_readable(handle)
            finally:
                os.close(handle)

    def close(self) -> None:
        """Let go; safe to repeat."""
        while self._handles:
            os.close(self._handles.pop())


def host_id(pid: int, inside: int) -> int:
    """Return the host's number of user (and group) `inside` of the process `pid`.

    Raises:
        OSError: The process is gone.
        ValueError: Its user namespace has no such user.
    """
    for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines():
        first, outside, count = (int(part) for part in line.split())
        if first <= inside < first + count:
            return outside + inside - first
    raise ValueError(f"process {pid} has no user {inside}")
