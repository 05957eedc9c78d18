"""Cgroups: limits of a sandbox's memory, processes and CPUs, and whether it ran out of memory.

Both versions are supported. Version 1 has a tree per controller, such as ``/sys/fs/cgroup/memory``. Version 2 has one
tree; the nearest folder at or above our own cgroup is used in which cgroups with these controllers can be made. A name
starts with the process that made the cgroup (`envkit.sandbox.host.run_dirs.owner_name`), so that a later run can remove
orphans. A process that takes over ownership is recorded in the cgroup as the name of an empty child cgroup, so that
both can only be seen together.
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
"""The largest allocation at once, and so the most that may be free below a limit when the kernel refuses memory."""
_PERIOD_US = 100_000
_MIN_QUOTA_US = 1_000


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of a sandbox; None means unlimited.

    Attributes:
        memory_mib: Memory, MiB, including files in /tmp and /workspace; there is no swap.
        pids: Number of processes and threads.
        cpus: Processors, such as 0.5.
    """

    memory_mib: int | None = None
    pids: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class CgroupFolders:
    """Folders in which cgroups can be made on this machine.

    Attributes:
        is_unified: Whether the version is 2.
        parents: The folder for each available controller.
    """

    is_unified: bool
    parents: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class MemoryCounters:
    """The kernel's counters of one cgroup.

    Attributes:
        oom_kills: Processes killed because the cgroup or the whole machine ran out of memory.
        limit_hit: Whether the cgroup reached its own limit since `Cgroup.survived`, or since it was made. Version 1
            includes reclaimable page cache.
    """

    oom_kills: int = 0
    limit_hit: bool = False

    def cause(self, survived: int) -> Cause | None:
        """Return the cause if process 1 was killed for lack of memory; None if it was not.

        Args:
            survived: OOM kills in the cgroup that process 1 survived.
        """
        if self.oom_kills <= survived:
            return None
        if self.limit_hit:
            return Cause(CauseKind.OUT_OF_MEMORY, "out of memory", by_agent=True)
        return Cause(CauseKind.OUT_OF_MEMORY, "out of memory: the host's, not the sandbox's limit")


class Cgroup:
    """The cgroup of one sandbox: a folder, or with version 1 one for each controller.

    Attributes:
        name: Name of each folder.
        of_agent: The child cgroup for the agent's programs, which need not exist; None if memory is not limited.
    """

    def __init__(self, parents: CgroupFolders, name: str) -> None:
        self.name = name
        self._is_unified = parents.is_unified
        self._folders = {controller: parent / name for controller, parent in parents.parents.items()}
        memory = self._folders.get("memory")
        self.of_agent = None if memory is None else AgentCgroup(memory, is_unified=self._is_unified)
        self._hits_before = 0

    def make(self, limits: CgroupLimits) -> None:
        """Create it with its limits.

        Raises:
            OSError: The kernel refuses.
        """
        for folder in self._each():
            folder.mkdir(exist_ok=True)
        if limits.memory_mib is not None:
            self._limit_memory(limits.memory_mib << 20)
            if self.of_agent is not None:
                with suppress(OSError):
                    self.of_agent.make(limits.memory_mib)
        if limits.pids is not None:
            self._set("pids", "pids.max", str(limits.pids))
        if limits.cpus is not None:
            quota = max(round(limits.cpus * _PERIOD_US), _MIN_QUOTA_US)
            if self._is_unified:
                self._set("cpu", "cpu.max", f"{quota} {_PERIOD_US}")
            else:
                self._set("cpu", "cpu.cfs_period_us", str(_PERIOD_US))
                self._set("cpu", "cpu.cfs_quota_us", str(quota))

    def transfer_to(self, pid: int) -> None:
        """Keep it for as long as the running process `pid` lives, even if its maker exits.

        Raises:
            OSError: The kernel refuses.
        """
        for folder in self._each():
            (folder / run_dirs.owner_name(pid)).mkdir()

    def join(self, pid: int) -> None:
        """Move a process into it; processes that it starts later are in it too.

        Raises:
            OSError: The kernel refuses.
        """
        for folder in self._each():
            of_agent = self.of_agent if folder == self._folders.get("memory") else None
            procs = (folder if of_agent is None else of_agent.first_folder) / "cgroup.procs"
            with procs.open("r+") as file:
                file.write(str(pid))

    def views(self) -> list[tuple[Path, str]]:
        """Return each folder and the path at which programs expect it."""
        if self._is_unified:
            return [(folder, str(ROOT)) for folder in self._each()]
        return [(folder, str(ROOT / controller)) for controller, folder in self._folders.items()]

    def memory_counters(self) -> MemoryCounters:
        """Return the counters of it and its children; zeros if they are unknown."""
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
        """Record that process 1 survived an OOM kill: `memory_counters` ignores limit hits up to now."""
        if self.of_agent is not None:
            self._hits_before = _counts(self._folders["memory"] / "memory.events").get("oom", 0)
            self.of_agent.forget_peaks()

    def kill(self) -> None:
        """Kill all processes in it."""
        for folder in (*self._below(), *self._each()):
            with suppress(OSError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> bool:
        """Remove it unless a process is in it; return whether nothing of it is left."""
        if self.of_agent is not None:
            self.of_agent.remove()
        for folder in self._each():
            for path in (*_heirs(folder), folder):
                with suppress(OSError):
                    path.rmdir()
        return not any(folder.exists() for folder in self._each())

    def _each(self) -> list[Path]:
        return list(dict.fromkeys(self._folders.values()))

    def _below(self) -> list[Path]:
        return [] if self.of_agent is None else self.of_agent.folders

    def _limit_memory(self, size: int) -> None:
        if self._is_unified:
            self._set("memory", "memory.max", str(size))
            with suppress(FileNotFoundError):  # the kernel has no swap
                self._set("memory", "memory.swap.max", "0")
            return
        self._set("memory", "memory.limit_in_bytes", str(size))
        try:
            self._set("memory", "memory.memsw.limit_in_bytes", str(size))
        except FileNotFoundError:  # the kernel does not account swap
            self._set("memory", "memory.swappiness", "0")

    def _set(self, controller: str, name: str, value: str) -> None:
        # Without O_CREAT, so that this fails instead of creating a file if the folder is not a cgroup.
        with (self._folders[controller] / name).open("r+") as file:
            file.write(value)


def find(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> CgroupFolders:
    """Return the folders in which cgroups can be made.

    Args:
        root: Mount point of the cgroup file system.
        own: File with the name of our own cgroup.
    """
    if (root / "cgroup.controllers").exists():
        parent = next((folder for folder in _upwards(root, own) if _has_controllers(folder)), None)
        return CgroupFolders(is_unified=True, parents={} if parent is None else dict.fromkeys(CONTROLLERS, parent))
    parents = {name: root / name for name in CONTROLLERS}
    parents = {name: folder for name, folder in parents.items() if _is_writable(folder)}
    return CgroupFolders(is_unified=False, parents=parents)


def gone(folders: CgroupFolders) -> list[Cgroup]:
    """Return orphaned cgroups: neither their maker nor a process that took over ownership lives."""
    found = [folder for parent in folders.parents.values() for folder in parent.glob("envkit-*")]
    needed = {folder.name for folder in found if _is_needed(folder)}
    return [Cgroup(folders, name) for name in sorted({folder.name for folder in found} - needed)]


def _counts(file: Path) -> dict[str, int]:
    """Return the numbers in a file with lines such as ``oom_kill 3``; empty if it cannot be read."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _is_limit_hit(folder: Path) -> bool:
    """Whether a cgroup of version 1 reached its limit; newer kernels leave memory.failcnt at 0."""
    peak, limit = (_number(folder / name) for name in ("memory.max_usage_in_bytes", "memory.limit_in_bytes"))
    return 0 < limit <= peak + _HUGE_PAGE_BYTES


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
    except FileNotFoundError:  # another process has just removed it
        return []


def _upwards(root: Path, own: Path) -> Iterator[Path]:
    """Yield our own cgroup of version 2 and its parents."""
    lines = own.read_text().splitlines()
    name = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = root / name.lstrip("/")
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def _has_controllers(folder: Path) -> bool:
    """Whether children of `folder` in version 2 have the controllers; enables them if possible."""
    if not _is_writable(folder):
        return False
    switch = folder / "cgroup.subtree_control"
    try:
        missing = set(CONTROLLERS) - set(switch.read_text().split())
        if missing and missing <= set((folder / "cgroup.controllers").read_text().split()):
            with switch.open("r+") as file:  # fails while processes are in the folder
                file.write(" ".join(f"+{name}" for name in sorted(missing)))
            missing = set(CONTROLLERS) - set(switch.read_text().split())
    except OSError:
        return False
    return not missing


def _is_writable(folder: Path) -> bool:
    """Whether cgroups can be made in `folder` and processes moved into them."""
    return os.access(folder / "cgroup.procs", os.W_OK) and os.access(folder, os.W_OK | os.X_OK)
