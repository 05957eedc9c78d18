"""Enforce the disk quota of sandboxes with a writable root file system, and check the free space of Docker's disk.

Docker can limit the size of a root file system only on few disks, so envkit monitors it. Summing a sandbox's files with
`du` is slow, but reading the disk's free space takes microseconds. Unless other programs free space, a sandbox cannot
have written more than the free space has decreased. Its files are therefore summed only when the decrease exceeds the
quota that was left, and at intervals, in case other programs have freed space. The less quota is left, the more often
the free space is read. The kernel limits the size of a single file to the quota.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import anyio

from envkit import clock
from envkit.errors import SandboxError, SandboxRefusedError, SandboxStartError
from envkit.types import Cause, CauseKind, SandboxSpec

from ..agent_client.channel import AgentChannel
from .api import Daemon, DaemonError
from .container import DiskPaths

LEAST_FREE_MIB = 1024
"""MiB that must stay free on Docker's disk."""

_FASTEST_BYTES_S = 4 << 30
"""Assumed maximum write speed of a sandbox, in bytes per second."""
_SOONEST_S = 0.05
_LATEST_S = 0.5
_STALE_S = 5.0
"""Minimum number of seconds between two sums of the files if the free space has decreased only a little."""
_REST = 20
"""Minimum time between two such sums, as a multiple of the time that the first took. The longer minimum applies."""
_COUNT_S = 30.0
_FILES_PER_MIB = 256
"""Number of files allowed for each MiB of quota: one for each 4 KiB block."""


class DaemonDisk:
    """The disk on which a Docker daemon stores its images and containers."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._root = str(daemon.info.get("DockerRootDir") or "")

    def free_mib(self) -> int | None:
        """Return the free space in MiB; None if this process cannot read it."""
        found = self._statvfs()
        return None if found is None else found.f_bavail * found.f_frsize >> 20

    def require_room(self, sandbox_id: str, spec: SandboxSpec) -> None:
        """Raise if the disk has too little free space to start a sandbox.

        Raises:
            SandboxRefusedError: The sandbox's disk quota exceeds the free space.
            SandboxStartError: The disk is nearly full.
        """
        free_mib = self.free_mib()
        if free_mib is None:
            return
        if spec.profile == "system" and (spec.disk_mib or 0) > free_mib:
            cause = f"disk_mib={spec.disk_mib} is refused: Docker's disk has {free_mib} MiB free"
            raise SandboxRefusedError(sandbox_id, cause)
        if free_mib < LEAST_FREE_MIB:
            raise SandboxStartError(
                sandbox_id,
                f"Docker's disk has {free_mib} MiB free (minimum {LEAST_FREE_MIB}); try docker system prune",
            )

    async def commit(self, container: str, disk_mib: int) -> tuple[str, int]:
        """Pause a container and create an image from its files; return the image's id and its additional size in bytes.

        Raises:
            SandboxError: The container exceeds its quota `disk_mib`, or the disk is nearly full.
        """
        await self._daemon.pause(container)
        try:
            # Sparse files count with their full length, because an image stores their holes too.
            bytes_ = await self._daemon.written_bytes(container)
            if bytes_ > disk_mib << 20:
                raise SandboxError(
                    f"no snapshot: the files of the sandbox take {bytes_ >> 20} MiB (limit {disk_mib} MiB)"
                )
            free_mib = self.free_mib()
            if free_mib is not None and free_mib - (bytes_ >> 20) < LEAST_FREE_MIB:
                raise SandboxError(
                    f"no snapshot: it needs {bytes_ >> 20} MiB, and Docker's disk has {free_mib} MiB free (minimum"
                    f" {LEAST_FREE_MIB}); free disk space"
                )
            return await self._daemon.commit(container), bytes_
        finally:
            with anyio.CancelScope(shield=True), suppress(DaemonError):  # the container may have ended
                await self._daemon.unpause(container)

    async def monitor(self, channel: AgentChannel, paths: DiskPaths | None, use: DiskUse) -> None:
        """Kill a sandbox when it exceeds its quota or the disk is nearly full; return when the sandbox has ended.

        Args:
            channel: Channel of the sandbox's agent.
            paths: Where the sandbox writes on the disk. If it is None, only the free space of the disk is monitored.
            use: The sandbox's quota. This method updates its `percent`.
        """
        disk_mib = use.disk_mib
        content = _UseOf("--block-size=1", disk_mib << 20, counts_deleted=True)
        files = _UseOf("--inodes", disk_mib * _FILES_PER_MIB)
        while (found := self._statvfs()) is not None and not channel.is_ended:
            free_mib = found.f_bavail * found.f_frsize >> 20
            if free_mib < LEAST_FREE_MIB:
                full = f"Docker's disk has {free_mib} MiB free (minimum {LEAST_FREE_MIB})"
                channel.fail(Cause(CauseKind.DISK_FULL, full))
                return
            try:
                if paths and await content.exceeds_limit(paths, found.f_bfree * found.f_frsize):
                    taken_mib = -(-content.taken >> 20)
                    detail = f"its files take {taken_mib} MiB of Docker's disk, more than disk_mib={disk_mib}"
                    channel.fail(Cause(CauseKind.DISK_FULL, detail, by_agent=True))
                elif paths and await files.exceeds_limit(paths, found.f_ffree):
                    detail = f"it has {files.taken} files, more than the limit {files.limit} for disk_mib={disk_mib}"
                    channel.fail(Cause(CauseKind.DISK_FULL, detail, by_agent=True))
            except TimeoutError:
                channel.fail(Cause(CauseKind.DISK_FULL, f"its disk use could not be summed within {_COUNT_S:g} s"))
            except OSError as error:
                channel.fail(Cause(CauseKind.DISK_FULL, f"its disk use cannot be summed: {error}"))
            use.percent = max(100 - 100 * content.left // content.limit, 100 - 100 * files.left // files.limit, 0)
            await anyio.sleep(min(max(content.left / _FASTEST_BYTES_S, _SOONEST_S), _LATEST_S))

    def _statvfs(self) -> os.statvfs_result | None:
        if not self._daemon.is_near:
            return None
        try:
            return os.statvfs(self._root)
        except OSError:
            return None


@dataclass(slots=True)
class DiskUse:
    """A sandbox's disk quota in MiB, and an upper bound of how many percent of it were in use at the last check."""

    disk_mib: int
    percent: int = 0


@dataclass(slots=True)
class _UseOf:
    """How much a sandbox uses of one resource of the disk: bytes or inodes.

    Attributes:
        option: Option of `du` that sums the resource.
        limit: Quota of the sandbox.
        counts_deleted: Whether to count deleted files that a process still has open or mapped.
        taken: Use at the last sum.
        left: Lower bound of the unused quota. It counts all writes to the disk since the last sum as the sandbox's.
    """

    option: str
    limit: int
    counts_deleted: bool = False
    taken: int = 0
    left: int = 0
    _free: int = -1
    _counted_s: float = 0.0
    _rest_s: float = 0.0

    async def exceeds_limit(self, paths: DiskPaths, free: int) -> bool:
        """Return whether the use exceeds the quota. Sum the files at intervals, and if `free` fell by more than `left`.

        Raises:
            OSError: The program `du` is missing.
            TimeoutError: Summing takes longer than 30 s.
        """
        self.left = self.limit - self.taken - max(self._free - free, 0)
        is_stale = free != self._free and clock.now() - self._counted_s > self._rest_s
        if self._free < 0 or self.left < 0 or is_stale:
            began_s = clock.now()
            self.taken = await self._sum(paths)
            self._free, self._counted_s = free, clock.now()
            self._rest_s = max(_STALE_S, _REST * (self._counted_s - began_s))
            self.left = self.limit - self.taken
        return self.taken > self.limit

    async def _sum(self, paths: DiskPaths) -> int:
        """Return how much the files use; a file that is deleted during this method counts only at the next sum."""
        # Scan the deleted files first: in the other order, a file that is deleted in between would count twice.
        deleted = await clock.to_thread(_deleted_bytes, paths) if self.counts_deleted else 0
        command = ["du", "--summarize", "--total", "--one-file-system", self.option, "--", *map(str, paths.folders)]
        with anyio.fail_after(_COUNT_S):
            done = await anyio.run_process(command, stderr=DEVNULL, check=False, env={"LC_ALL": "C"})
        total = done.stdout.splitlines()[-1:]
        return deleted + (int(total[0].split(b"\t")[0]) if total else 0)


def _deleted_bytes(paths: DiskPaths) -> int:
    """Return the total size of the deleted files that processes of a container still have open or mapped.

    Raises:
        TimeoutError: The scan takes longer than 30 s.
    """
    found: dict[tuple[int, int], int] = {}
    began_s = clock.stopwatch()
    first = Path("/proc", str(paths.first_pid))
    try:
        own = (first / "ns/mnt").readlink()
        devices = {folder.stat().st_dev for folder in (first / "root", *paths.folders)}
    except OSError:  # the container has ended
        return 0
    for task in tasks():  # not only processes: a thread may have its own open files, and outlive the main thread
        with suppress(OSError):
            for file in _held(task) if (task / "ns/mnt").readlink() == own else ():
                with suppress(OSError):
                    about = file.stat()
                    if stat.S_ISREG(about.st_mode) and about.st_nlink == 0 and about.st_dev in devices:
                        found[about.st_dev, about.st_ino] = about.st_blocks * 512
        if clock.stopwatch() - began_s > _COUNT_S:
            raise TimeoutError
    return sum(found.values())


def tasks() -> Iterator[Path]:
    """Yield the ``/proc`` folders of all threads of this machine; threads that end during the scan are skipped."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                found = [Path("/proc", task.name) for task in (process / "task").iterdir()]
            except OSError:
                continue
            yield from found


def _held(task: Path) -> Iterator[Path]:
    """Yield the paths in ``/proc`` of a thread's open files, and of those mapped files that are deleted."""
    yield from (task / "fd").iterdir()
    with (task / "maps").open("rb") as lines:
        for line in lines:
            if line.endswith(b" (deleted)\n"):
                begin, end = (int(number, 16) for number in line.split(b" ", 1)[0].split(b"-"))
                yield task / "map_files" / f"{begin:x}-{end:x}"
