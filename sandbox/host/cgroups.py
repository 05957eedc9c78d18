"""Cgroups limit the memory, processes and CPUs of a sandbox, and report whether the sandbox ran out of memory.

Both versions of cgroups are supported. Version 1 has one tree of cgroups for each controller, such as
``/sys/fs/cgroup/memory``. Version 2 has a single tree. New cgroups are created in the cgroup of this process, or in
its nearest ancestor that allows the controllers. The owner of a cgroup is the process that supervises the sandbox. The
name of the cgroup starts with `envkit.runs.owners.owner_name` of the owner, so that a later process can find
and remove cgroups whose owner has ended. Further owners are recorded as empty child cgroups with their `owner_name`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from envkit.runs import owners
from envkit.types import Cause, CauseKind
from envkit.types.sandboxes import SandboxLimits

from .agent_cgroup import AgentCgroup, write

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")

_HUGE_PAGE_BYTES = 2 << 20
"""Size of a huge page. Allocating one can hit the memory limit while the recorded peak is this far below the limit."""
_PERIOD_US = 100_000
_MIN_QUOTA_US = 1_000


@dataclass(frozen=True, slots=True)
class CgroupFolders:
    """Folders of this machine in which cgroups can be created.

    Attributes:
        is_unified: Whether the machine uses cgroups version 2.
        parents: Folder in which to create cgroups, by name of the controller. Unavailable controllers are missing.
    """

    is_unified: bool
    parents: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class MemoryCounters:
    """Counters of the kernel for one cgroup.

    Attributes:
        oom_kills: Number of the cgroup's processes that the kernel killed because the cgroup or the whole machine ran
            out of memory.
        limit_hit: Whether the cgroup has reached its own memory limit since its creation or the last call of
            `Cgroup.survived`. In version 1, page cache that the kernel could free counts, too.
    """

    oom_kills: int = 0
    limit_hit: bool = False

    def cause(self, survived: int) -> Cause | None:
        """Return the cause "out of memory" if there were more OOM kills than process 1 has survived; otherwise None."""
        if self.oom_kills <= survived:
            return None
        if self.limit_hit:
            return Cause(CauseKind.OUT_OF_MEMORY, "out of memory", by_agent=True)
        return Cause(CauseKind.OUT_OF_MEMORY, "out of memory: the host ran out before the sandbox reached its limit")


class Cgroup:
    """The cgroup of one sandbox: one folder in version 2, or one folder per controller in version 1.

    Attributes:
        name: Name of the folders.
        of_agent: Child cgroup for the programs of the user ``agent``. Its folder is missing if the kernel refused to
            create it. None if the memory controller is not available.
    """

    def __init__(self, parents: CgroupFolders, name: str) -> None:
        self.name = name
        self._is_unified = parents.is_unified
        self._folders = {controller: parent / name for controller, parent in parents.parents.items()}
        memory = self._folders.get("memory")
        self.of_agent = None if memory is None else AgentCgroup(memory, is_unified=self._is_unified)
        self._hits_before = 0

    def make(self, limits: SandboxLimits) -> None:
        """Create the cgroup with those of the limits whose controllers are available.

        Swap cannot be used. Files in /tmp and /workspace count as memory.

        Raises:
            OSError: The kernel refuses.
        """
        for folder in self._each():
            folder.mkdir(exist_ok=True)
        if self.of_agent is not None:
            self._limit_memory(limits.memory_mib << 20)
            with suppress(OSError):
                self.of_agent.make(limits.memory_mib)
        if "pids" in self._folders:
            self._set("pids", "pids.max", str(limits.pids))
        if limits.cpus is not None:
            quota = max(round(limits.cpus * _PERIOD_US), _MIN_QUOTA_US)
            if self._is_unified:
                self._set("cpu", "cpu.max", f"{quota} {_PERIOD_US}")
            else:
                self._set("cpu", "cpu.cfs_period_us", str(_PERIOD_US))
                self._set("cpu", "cpu.cfs_quota_us", str(quota))

    def transfer_to(self, pid: int) -> None:
        """Make the running process `pid` a further owner. The cgroup is not an orphan while at least one owner runs.

        Raises:
            OSError: The kernel refuses.
        """
        for folder in self._each():
            (folder / owners.owner_name(pid)).mkdir()

    def join(self, pid: int) -> None:
        """Move the process `pid` into the cgroup. Child processes that it starts later belong to the cgroup, too.

        Raises:
            OSError: The kernel refuses.
        """
        for folder in self._each():
            of_agent = self.of_agent if folder == self._folders.get("memory") else None
            procs = (folder if of_agent is None else of_agent.first_folder) / "cgroup.procs"
            write(procs, str(pid))

    def views(self) -> list[tuple[Path, str]]:
        """Return each host folder of the cgroup with the path at which programs in the sandbox look for it."""
        if self._is_unified:
            return [(folder, str(ROOT)) for folder in self._each()]
        return [(folder, str(ROOT / controller)) for controller, folder in self._folders.items()]

    def memory_counters(self) -> MemoryCounters:
        """Return the counters of the cgroup, including those of its children; zeros if they cannot be read."""
        folder = self._folders.get("memory")
        if folder is None or self.of_agent is None:
            return MemoryCounters()
        if self._is_unified:
            events = _counts(folder / "memory.events")
            return MemoryCounters(events.get("oom_kill", 0), events.get("oom", 0) > self._hits_before)
        folders = (folder, self.of_agent.folder)
        kills = sum(_counts(path / "memory.oom_control").get("oom_kill", 0) for path in folders)
        return MemoryCounters(kills, any(map(_is_limit_hit, folders)))

    def is_full_of_processes(self) -> bool:
        """Return whether at least three quarters of the limit of processes are used; the rest may be in reserve."""
        folder = self._folders.get("pids", Path())
        try:
            used, limit = (int((folder / name).read_text()) for name in ("pids.current", "pids.max"))
        except (OSError, ValueError):  # there is no limit
            return False
        return used >= limit * 3 // 4

    def survived(self) -> None:
        """Record that process 1 survived an OOM kill, so that `MemoryCounters.limit_hit` ignores earlier limit hits."""
        if self.of_agent is not None:
            self._hits_before = _counts(self._folders["memory"] / "memory.events").get("oom", 0)
            self.of_agent.forget_peaks()

    def kill(self) -> None:
        """Kill all processes in the cgroup and its children."""
        for folder in (*(() if self.of_agent is None else self.of_agent.folders), *self._each()):
            with suppress(OSError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the cgroup, unless it contains processes; return whether all its folders are gone."""
        if self.of_agent is not None:
            self.of_agent.remove()
        for folder in self._each():
            for path in (*_heirs(folder), folder):
                with suppress(OSError):
                    path.rmdir()
        return not any(folder.exists() for folder in self._each())

    def _each(self) -> list[Path]:
        return list(dict.fromkeys(self._folders.values()))

    def _limit_memory(self, size: int) -> None:
        if self._is_unified:
            self._set("memory", "memory.max", str(size))
            with suppress(FileNotFoundError):  # the file is missing if the kernel does not support swap
                self._set("memory", "memory.swap.max", "0")
            return
        self._set("memory", "memory.limit_in_bytes", str(size))
        try:
            self._set("memory", "memory.memsw.limit_in_bytes", str(size))
        except FileNotFoundError:  # the file is missing if the kernel does not account swap
            self._set("memory", "memory.swappiness", "0")

    def _set(self, controller: str, name: str, value: str) -> None:
        write(self._folders[controller] / name, value)


def find(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> CgroupFolders:
    """Return the folders of this machine in which cgroups can be created.

    Args:
        root: Mount point of the cgroup file system.
        own: File from which to read the name of this process's cgroup.
    """
    if (root / "cgroup.controllers").exists():
        parent = next((folder for folder in _upwards(root, own) if _has_controllers(folder)), None)
        return CgroupFolders(is_unified=True, parents={} if parent is None else dict.fromkeys(CONTROLLERS, parent))
    parents = {name: root / name for name in CONTROLLERS}
    parents = {name: folder for name, folder in parents.items() if _is_writable(folder)}
    return CgroupFolders(is_unified=False, parents=parents)


def gone(folders: CgroupFolders) -> list[Cgroup]:
    """Return the orphans in `folders`: cgroups whose owners have all ended."""
    found = [folder for parent in folders.parents.values() for folder in parent.glob("envkit-*")]
    needed = {folder.name for folder in found if _is_needed(folder)}
    return [Cgroup(folders, name) for name in sorted({folder.name for folder in found} - needed)]


def _counts(file: Path) -> dict[str, int]:
    """Return the numbers, by name, in a file with lines such as ``oom_kill 3``; empty if the file cannot be read."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _is_limit_hit(folder: Path) -> bool:
    """Whether a version 1 cgroup reached its limit, judged by its peak, as new kernels do not update memory.failcnt."""
    peak, limit = (_number(folder / name) for name in ("memory.max_usage_in_bytes", "memory.limit_in_bytes"))
    return 0 < limit <= peak + _HUGE_PAGE_BYTES


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _is_needed(group: Path) -> bool:
    return not all(owners.is_owner_gone(folder.name) for folder in (group, *_heirs(group)))


def _heirs(group: Path) -> list[Path]:
    try:
        return list(group.glob("envkit-*"))
    except FileNotFoundError:  # another process has just removed the cgroup
        return []


def _upwards(root: Path, own: Path) -> Iterator[Path]:
    """Yield the folder of the version 2 cgroup of this process, then the folders above it, up to `root`."""
    lines = own.read_text().splitlines()
    name = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = root / name.lstrip("/")
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def _has_controllers(folder: Path) -> bool:
    """Try to enable all controllers for children of the version 2 cgroup `folder`; return whether all are enabled."""
    if not _is_writable(folder):
        return False
    switch = folder / "cgroup.subtree_control"
    try:
        missing = set(CONTROLLERS) - set(switch.read_text().split())
        if missing and missing <= set((folder / "cgroup.controllers").read_text().split()):
            write(switch, " ".join(f"+{name}" for name in sorted(missing)))  # fails if the cgroup contains processes
            missing = set(CONTROLLERS) - set(switch.read_text().split())
    except OSError:
        return False
    return not missing


def _is_writable(folder: Path) -> bool:
    """Whether this process may create cgroups in `folder` and move processes into them."""
    return os.access(folder / "cgroup.procs", os.W_OK) and os.access(folder, os.W_OK | os.X_OK)
