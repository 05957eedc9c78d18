"""The disk that Docker writes to, and what boxes whose root file system can be written take of it.

Docker cannot bound a root file system on most disks, so such a box is watched. To add up its files takes a while, to
ask the disk how much is free takes microseconds: since the box cannot have taken more than what has gone from the disk,
its files are added up only when that could be too much, and from time to time, since others also give space back. The
less the box has left, the sooner the disk is asked again. One file cannot be larger than the bound, by the kernel.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import TypeAlias

import anyio

from envkit import clock
from envkit.errors import SandboxError, SandboxRefusedError, SandboxStartError
from envkit.types import Cause, CauseKind, SandboxSpec

from ..agent_client.channel import AgentChannel
from .api import Daemon, DaemonError
from .container import Written

LEAST_FREE_MIB = 1024
"""What must be free on it."""

_FASTEST_BYTES_S = 4 << 30
"""What a box may write in a second."""
_SOONEST_S = 0.05
_LATEST_S = 0.5
_STALE_S = 5.0
"""Seconds after which files are added up again although little has gone."""
_REST = 20
"""How many times as long as adding up took there is none without need."""
_COUNT_S = 30.0
_COUNTS = 4
_FILES_PER_MIB = 256
"""So many as a MiB has blocks."""

Deleted: TypeAlias = Mapping[tuple[int, int], int]
"""Files without a name that programs still hold, by device and inode, with the bytes that each takes."""


class DaemonDisk:
    """What a daemon writes to.

    Args:
        daemon: The daemon.
    """

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._root = str(daemon.info.get("DockerRootDir") or "")

    def free_mib(self) -> int | None:
        """Return what is free; None where we cannot see that."""
        found = self._look()
        return None if found is None else found.f_bavail * found.f_frsize >> 20

    def require_room(self, sandbox_id: str, spec: SandboxSpec) -> None:
        """Raise where there is too little room for a box.

        Raises:
            SandboxRefusedError: Less is free than its root file system may take.
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
                f"Docker's disk has {free_mib} MiB free, fewer than {LEAST_FREE_MIB}; try docker system prune",
            )

    async def commit(self, container: str, disk_mib: int) -> tuple[str, int]:
        """Make an image of a container's files, which stands still then; return its id, and the bytes that it adds.

        Raises:
            SandboxError: It has written more than `disk_mib`, or the disk is nearly full.
        """
        await self._daemon.pause(container)
        try:
            # With the holes of its files, which are none in an image.
            bytes_ = await self._daemon.written_bytes(container)
            if bytes_ > disk_mib << 20:
                raise SandboxError(f"no snapshot: its files have {bytes_ >> 20} MiB, more than {disk_mib}")
            free_mib = self.free_mib()
            if free_mib is not None and free_mib - (bytes_ >> 20) < LEAST_FREE_MIB:
                raise SandboxError(
                    f"no snapshot: it has {bytes_ >> 20} MiB, Docker's disk has {free_mib} MiB free, and"
                    f" {LEAST_FREE_MIB} are left to others"
                )
            return await self._daemon.commit(container), bytes_
        finally:
            with anyio.CancelScope(shield=True), suppress(DaemonError):  # it may have ended
                await self._daemon.unpause(container)

    async def watch(self, channel: AgentChannel, written: Written | None, use: DiskUse) -> None:
        """End a box before it fills the disk, or once its files take more than `disk_mib`, until it has ended.

        Args:
            channel: The box's.
            written: Its files; None when they cannot be seen.
            use: How much they may take, which is told how much they do.
        """
        disk_mib = use.disk_mib
        content = _Use("--block-size=1", disk_mib << 20, _deleted)
        files = _Use("--inodes", disk_mib * _FILES_PER_MIB)
        while (found := self._look()) is not None and not channel.is_ended:
            free_mib = found.f_bavail * found.f_frsize >> 20
            if free_mib < LEAST_FREE_MIB:
                full = f"Docker's disk has {free_mib} MiB free, fewer than {LEAST_FREE_MIB}"
                channel.fail(Cause(CauseKind.DISK_FULL, full))
                return
            try:
                if written and await content.is_too_much(written, found.f_bfree * found.f_frsize):
                    taken_mib = -(-content.taken >> 20)
                    said = f"its files take {taken_mib} MiB of Docker's disk, more than disk_mib={disk_mib}"
                    channel.fail(Cause(CauseKind.DISK_FULL, said, by_agent=True))
                elif written and await files.is_too_much(written, found.f_ffree):
                    said = f"it has {files.taken} files, more than the {files.bound} of disk_mib={disk_mib}"
                    channel.fail(Cause(CauseKind.DISK_FULL, said, by_agent=True))
            except TimeoutError:
                channel.fail(Cause(CauseKind.DISK_FULL, f"its files could not be added up within {_COUNT_S:g} s"))
            except OSError as error:
                channel.fail(Cause(CauseKind.DISK_FULL, f"its files cannot be added up: {error}"))
            use.percent = max(100 - 100 * content.left // content.bound, 100 - 100 * files.left // files.bound, 0)
            await anyio.sleep(min(max(content.left / _FASTEST_BYTES_S, _SOONEST_S), _LATEST_S))

    def _look(self) -> os.statvfs_result | None:
        if not self._daemon.is_near:
            return None
        try:
            return os.statvfs(self._root)
        except OSError:
            return None


@dataclass(slots=True)
class DiskUse:
    """What a box writes: how many MiB it may, and how many percent of that it does at most, when that was looked at."""

    disk_mib: int
    percent: int = 0


@dataclass(slots=True)
class _Use:
    """What the files of one box take of one thing.

    Attributes:
        option: What `du` is to add up.
        bound: How much they may take.
        unseen: Returns the files that `du` does not see.
        taken: How much they took when that was added up.
        left: How much they have left, if all that has gone since is theirs.
    """

    option: str
    bound: int
    unseen: Callable[[Written], Deleted] | None = None
    taken: int = 0
    left: int = 0
    _free: int = -1
    _counted_s: float = 0.0
    _rest_s: float = 0.0

    async def is_too_much(self, written: Written, free: int) -> bool:
        """Say whether they take too much, adding them up if that may be.

        Args:
            written: The files.
            free: What the disk has free.

        Raises:
            OSError: There is no `du`.
            TimeoutError: That takes longer than half a minute.
        """
        self.left = self.bound - self.taken - max(self._free - free, 0)
        is_stale = free != self._free and clock.now() - self._counted_s > self._rest_s
        if self._free < 0 or self.left < 0 or is_stale:
            began_s = clock.now()
            self.taken = await self._added_up(written)
            self._free, self._counted_s = free, clock.now()
            self._rest_s = max(_STALE_S, _REST * (self._counted_s - began_s))
            self.left = self.bound - self.taken
        return self.taken > self.bound

    async def _added_up(self, written: Written) -> int:
        """Return what they take."""
        unseen = self.unseen
        if unseen is None:
            return await self._named(written)

        async def deleted() -> Deleted:
            return await clock.to_thread(unseen, written)

        return await counted_once(partial(self._named, written), deleted, self.bound)

    async def _named(self, written: Written) -> int:
        """Return what those with a name take; what vanishes meanwhile is left out."""
        command = ["du", "--summarize", "--total", "--one-file-system", self.option, "--", *map(str, written.places)]
        with anyio.fail_after(_COUNT_S):
            done = await anyio.run_process(command, stderr=DEVNULL, check=False, env={"LC_ALL": "C"})
        total = done.stdout.splitlines()[-1:]
        return int(total[0].split(b"\t")[0]) if total else 0


async def counted_once(
    named: Callable[[], Awaitable[int]], deleted: Callable[[], Awaitable[Deleted]], bound: int
) -> int:
    """Return the bytes that files take, with a name or deleted; whether that is more than `bound` counts each once.

    A file that is deleted between the two looks may have been seen by both. Where that decides, both are repeated: what
    was deleted before them, only one of them has seen. Whoever deletes files during all of them is not believed.

    Args:
        named: Returns the bytes of the files with a name, which it walks to.
        deleted: Returns those without.
        bound: How many bytes they may take.
    """
    most = 0
    gone: Deleted = {}
    for _ in range(_COUNTS):
        seen = await named()
        before, gone = gone, await deleted()
        most = seen + sum(gone.values())
        least = seen + sum(bytes_ for file, bytes_ in gone.items() if file in before)
        if most <= bound:
            return most
        if least > bound:
            return least
    return most


def _deleted(written: Written) -> Deleted:
    """Return the files of a container that are deleted, and that its processes still have open or in memory.

    Raises:
        TimeoutError: It takes longer than half a minute.
    """
    found: dict[tuple[int, int], int] = {}
    began_s = clock.stopwatch()
    first = Path("/proc", str(written.first_pid))
    try:
        own = (first / "ns/mnt").readlink()
        devices = {place.stat().st_dev for place in (first / "root", *written.places)}
    except OSError:  # it has ended
        return {}
    for task in tasks():  # each may have files of its own, and may have outlived its process's first
        with suppress(OSError):
            for file in _held(task) if (task / "ns/mnt").readlink() == own else ():
                with suppress(OSError):
                    about = file.stat()
                    if stat.S_ISREG(about.st_mode) and about.st_nlink == 0 and about.st_dev in devices:
                        found[about.st_dev, about.st_ino] = about.st_blocks * 512
        if clock.stopwatch() - began_s > _COUNT_S:
            raise TimeoutError
    return found


def tasks() -> Iterator[Path]:
    """The tasks of this machine; what ends meanwhile is left out."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                found = [Path("/proc", task.name) for task in (process / "task").iterdir()]
            except OSError:
                continue
            yield from found


def _held(task: Path) -> Iterator[Path]:
    """The files that a task has open, and those of its memory that may be deleted."""
    yield from (task / "fd").iterdir()
    with (task / "maps").open("rb") as lines:
        for line in lines:
            if line.endswith(b" (deleted)\n"):
                begin, end = (int(number, 16) for number in line.split(b" ", 1)[0].split(b"-"))
                yield task / "map_files" / f"{begin:x}-{end:x}"
