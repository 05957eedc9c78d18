"""Control groups: what a whole box may use of memory, processes and processors, and whether memory ran out in it.

Both of the kernel's layouts are understood. Version 1 has a tree for each controller, below ``/sys/fs/cgroup/memory``
and so on; version 2 has one for all, of which the nearest folder above our own group is taken in which groups can be
made that hold the controllers. Names of groups begin with the process that made them
(`envkit.sandbox.host.run_dirs.owner_name`), so that a later run can remove those that nobody needs any more. Who
inherits a group from its maker stands in it, as the name of an empty group: whoever sees the one sees the other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from envkit.types import Cause, CauseKind

from . import run_dirs
from .agent_cgroup import AgentCgroup

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")

_HUGE_PAGE_BYTES = 2 << 20
"""The largest piece of memory that is asked for at once, and so what may be left of a limit that refused it."""
_PERIOD_US = 100_000
_LEAST_QUOTA_US = 1_000


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """What a box may use; None is without bound.

    Attributes:
        memory_mib: Memory, in which its files in /tmp and /workspace count, MiB; no swap beside it.
        pids: Number of processes and threads.
        cpus: Processors, such as 0.5.
    """

    memory_mib: int | None = None
    pids: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class CgroupFolders:
    """Where groups can be made on this machine.

    Attributes:
        is_unified: Whether it is version 2.
        parents: The folder to make a group in, for each controller that can be had.
    """

    is_unified: bool
    parents: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class MemoryCounters:
    """What the kernel has counted in one group.

    Attributes:
        oom_kills: Processes that were killed for want of memory, be it of the group or of the whole machine.
        limit_hit: Whether the group came to its own limit since `Cgroup.survived`, or since it was made. With version 1
            cached files count too, which could then be reclaimed.
    """

    oom_kills: int = 0
    limit_hit: bool = False

    def cause(self, survived: int) -> Cause | None:
        """Return the cause where a process 1 that was killed died for want of memory; None where it did not.

        Args:
            survived: OOM kills in the group after which process 1 was still there.
        """
        if self.oom_kills <= survived:
            return None
        if self.limit_hit:
            return Cause(CauseKind.OUT_OF_MEMORY, "out of memory", by_agent=True)
        return Cause(CauseKind.OUT_OF_MEMORY, "out of memory: the host's, not the sandbox's limit")


class Cgroup:
    """The group of one box: a folder, or with version 1 one for each controller.

    Attributes:
        name: Of each of them.
        of_agent: The group below it for the agent's programs, which need not exist; None where memory is unbounded.
    """

    def __init__(self, places: CgroupFolders, name: str) -> None:
        self.name = name
        self._is_unified = places.is_unified
        self._folders = {controller: parent / name for controller, parent in places.parents.items()}
        memory = self._folders.get("memory")
        self.of_agent = None if memory is None else AgentCgroup(memory, is_unified=self._is_unified)
        self._hits_before = 0

    def make(self, bounds: CgroupLimits) -> None:
        """Make it with its bounds.

        Raises:
            OSError: The kernel refuses.
        """
        for folder in self._each():
            folder.mkdir(exist_ok=True)
        if bounds.memory_mib is not None:
            self._bound_memory(bounds.memory_mib << 20)
            if self.of_agent is not None:
                with suppress(OSError):
                    self.of_agent.make(bounds.memory_mib)
        if bounds.pids is not None:
            self._set("pids", "pids.max", str(bounds.pids))
        if bounds.cpus is not None:
            quota = max(round(bounds.cpus * _PERIOD_US), _LEAST_QUOTA_US)
            if self._is_unified:
                self._set("cpu", "cpu.max", f"{quota} {_PERIOD_US}")
            else:
                self._set("cpu", "cpu.cfs_period_us", str(_PERIOD_US))
                self._set("cpu", "cpu.cfs_quota_us", str(quota))

    def bequeath(self, pid: int) -> None:
        """Have it be needed for as long as process `pid`, which is there, lives, also when its maker is no more.

        Raises:
            OSError: The kernel refuses.
        """
        for folder in self._each():
            (folder / run_dirs.owner_name(pid)).mkdir()

    def join(self, pid: int) -> None:
        """Put a process into it, with all that it will start.

        Raises:
            OSError: The kernel refuses.
        """
        for folder in self._each():
            of_agent = self.of_agent if folder == self._folders.get("memory") else None
            door = (folder if of_agent is None else of_agent.first_folder) / "cgroup.procs"
            with door.open("r+") as file:
                file.write(str(pid))

    def views(self) -> list[tuple[Path, str]]:
        """Each folder with the place at which programs expect to read it."""
        if self._is_unified:
            return [(folder, str(ROOT)) for folder in self._each()]
        return [(folder, str(ROOT / controller)) for controller, folder in self._folders.items()]

    def memory_counters(self) -> MemoryCounters:
        """Return what the kernel counted in it and below; zeros where this is not known."""
        folder = self._folders.get("memory")
        if folder is None or self.of_agent is None:
            return MemoryCounters()
        if self._is_unified:
            events = _counts(folder / "memory.events")
            return MemoryCounters(events.get("oom_kill", 0), events.get("oom", 0) > self._hits_before)
        both = (folder, self.of_agent.folder)
        kills = sum(_counts(one / "memory.oom_control").get("oom_kill", 0) for one in both)
        return MemoryCounters(kills, any(map(_is_limit_hit, both)))

    def survived(self) -> None:
        """Take note that process 1 survived an OOM kill: `memory_counters` ignores hits of the limit up to now."""
        if self.of_agent is not None:
            self._hits_before = _counts(self._folders["memory"] / "memory.events").get("oom", 0)
            self.of_agent.forget_peaks()

    def kill(self) -> None:
        """Kill who is in it."""
        for folder in (*self._below(), *self._each()):
            with suppress(OSError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> bool:
        """Remove it unless somebody is in it; return whether nothing of it is left."""
        if self.of_agent is not None:
            self.of_agent.remove()
        for folder in self._each():
            for place in (*_heirs(folder), folder):
                with suppress(OSError):
                    place.rmdir()
        return not any(folder.exists() for folder in self._each())

    def _each(self) -> list[Path]:
        return list(dict.fromkeys(self._folders.values()))

    def _below(self) -> list[Path]:
        return [] if self.of_agent is None else self.of_agent.folders

    def _bound_memory(self, size: int) -> None:
        if self._is_unified:
            self._set("memory", "memory.max", str(size))
            with suppress(FileNotFoundError):  # a kernel without swap
                self._set("memory", "memory.swap.max", "0")
            return
        self._set("memory", "memory.limit_in_bytes", str(size))
        try:
            self._set("memory", "memory.memsw.limit_in_bytes", str(size))
        except FileNotFoundError:  # a kernel that does not count swap
            self._set("memory", "memory.swappiness", "0")

    def _set(self, controller: str, name: str, value: str) -> None:
        # Opened without O_CREAT: in a folder that is no group this must fail, not leave a file.
        with (self._folders[controller] / name).open("r+") as file:
            file.write(value)


def find(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> CgroupFolders:
    """Return where groups can be made.

    Args:
        root: Where control groups are mounted.
        own: The file that names our own group.
    """
    if (root / "cgroup.controllers").exists():
        parent = next((place for place in _upwards(root, own) if _holds(place)), None)
        return CgroupFolders(is_unified=True, parents={} if parent is None else dict.fromkeys(CONTROLLERS, parent))
    parents = {name: root / name for name in CONTROLLERS}
    return CgroupFolders(is_unified=False, parents={name: place for name, place in parents.items() if _is_open(place)})


def gone(places: CgroupFolders) -> list[Cgroup]:
    """Return the groups that nobody needs: their maker is gone, and so is who inherited them."""
    found = [folder for parent in places.parents.values() for folder in parent.glob("envkit-*")]
    needed = {folder.name for folder in found if _is_needed(folder)}
    return [Cgroup(places, name) for name in sorted({folder.name for folder in found} - needed)]


def _counts(file: Path) -> dict[str, int]:
    """Return the numbers in a file with lines such as ``oom_kill 3``; none where it cannot be read."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _is_limit_hit(folder: Path) -> bool:
    """Whether a group of version 1 came to its limit; newer kernels leave memory.failcnt at 0."""
    most, limit = (_number(folder / name) for name in ("memory.max_usage_in_bytes", "memory.limit_in_bytes"))
    return 0 < limit <= most + _HUGE_PAGE_BYTES


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _is_needed(group: Path) -> bool:
    return not all(run_dirs.is_owner_gone(folder.name) for folder in (group, *_heirs(group)))


def _heirs(group: Path) -> list[Path]:
    try:
        return list(group.glob("envkit-*"))
    except FileNotFoundError:  # somebody else has just removed it
        return []


def _upwards(root: Path, own: Path) -> Iterator[Path]:
    """Our own group of version 2, and those around it."""
    lines = own.read_text().splitlines()
    name = next((line[3:] for line in lines if line.startswith("0::")), "/")
    place = root / name.lstrip("/")
    while place != root:
        yield place
        place = place.parent
    yield root


def _holds(place: Path) -> bool:
    """Whether groups in `place` of version 2 hold the controllers, or can be made to."""
    if not _is_open(place):
        return False
    switch = place / "cgroup.subtree_control"
    try:
        missing = set(CONTROLLERS) - set(switch.read_text().split())
        if missing and missing <= set((place / "cgroup.controllers").read_text().split()):
            with switch.open("r+") as file:  # refused while there are processes in it
                file.write(" ".join(f"+{name}" for name in sorted(missing)))
            missing = set(CONTROLLERS) - set(switch.read_text().split())
    except OSError:
        return False
    return not missing


def _is_open(place: Path) -> bool:
    """Whether groups can be made in `place` and processes moved into them."""
    return os.access(place / "cgroup.procs", os.W_OK) and os.access(place, os.W_OK | os.X_OK)
