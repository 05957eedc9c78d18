"""The memory cgroup of the programs of the user ``agent``: a child of the sandbox's cgroup, with a lower limit.

The difference between the two limits is reserved for process 1 and graders, which are not in the child cgroup. Memory
that belongs to no process (System V shared memory, unread socket buffers, inodes of empty files) is charged to the
cgroup of the program that allocated it. When the agent's programs use too much memory, the kernel thus kills only them.

Each process that process 1 forks for the agent moves into the child cgroup. In the sandbox, the cgroup file system is
read-only, except for the one file through which a process moves itself.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_AGENT = "agent"
_FIRST = "first"
"""Cgroup of process 1 and graders. Only in cgroups version 2, where a cgroup with children must not have processes."""
_MIN_MIB, _MAX_MIB = 32, 64
INSIDE = "/sys/fs/cgroup/memory/agent/tasks"
"""Path inside a container of the file through which a process moves itself into the agent's cgroup."""


def reserve_mib(memory_mib: int) -> int:
    """Return how many MiB of the limit the agent cannot use: 1/8, raised to 32 or cut to 64 MiB, but at most 1/4."""
    return min(max(memory_mib // 8, _MIN_MIB), _MAX_MIB, memory_mib // 4)


class AgentCgroup:
    """The memory cgroup of the agent's programs, a child of the sandbox's memory cgroup. `make` creates its `folder`.

    If `is_unified`, the host uses cgroups version 2.
    """

    def __init__(self, sandbox: Path, *, is_unified: bool) -> None:
        self._sandbox = sandbox
        self._is_unified = is_unified
        self.folder = sandbox / _AGENT

    @property
    def exists(self) -> bool:
        return self.folder.is_dir()

    @property
    def folders(self) -> list[Path]:
        """The folders of those child cgroups of the sandbox that exist."""
        return [folder for folder in (self.folder, self._sandbox / _FIRST) if folder.is_dir()]

    @property
    def first_folder(self) -> Path:
        """Folder of the cgroup to which process 1 belongs."""
        return self._sandbox / _FIRST if self._is_unified and self.exists else self._sandbox

    @property
    def join_file(self) -> Path:
        """The file through which a single-threaded process moves itself into the agent's cgroup, by writing "0"."""
        # In version 1, "tasks" moves a single thread. Unlike "cgroup.procs", this takes no lock of the whole machine.
        return self.folder / ("cgroup.procs" if self._is_unified else "tasks")

    def make(self, memory_mib: int) -> None:
        """Create the agent's cgroup. In version 2, the sandbox's cgroup must not contain processes yet.

        Raises:
            OSError: The kernel refuses. No cgroup is left behind.
        """
        limit = str(memory_mib - reserve_mib(memory_mib) << 20)
        try:
            if self._is_unified:
                write(self._sandbox / "cgroup.subtree_control", "+memory")
                (self._sandbox / _FIRST).mkdir(exist_ok=True)
            self.folder.mkdir(exist_ok=True)
            if self._is_unified:
                write(self.folder / "memory.max", limit)
            else:
                write(self.folder / "memory.limit_in_bytes", limit)
                with suppress(FileNotFoundError):  # the file is missing if the kernel does not account swap
                    write(self.folder / "memory.memsw.limit_in_bytes", limit)
        except OSError:
            self.remove()
            raise

    def forget_peaks(self) -> None:
        """Reset the kernel's record of the peak memory use. Does nothing in version 2, where the record is not used."""
        for folder in () if self._is_unified else (self._sandbox, self.folder):
            with suppress(OSError):
                write(folder / "memory.max_usage_in_bytes", "0")

    def remove(self) -> None:
        """Remove the agent's cgroup and the one of process 1. A cgroup that contains processes remains."""
        for folder in self.folders:
            with suppress(OSError):
                folder.rmdir()
        if self._is_unified and not self.folders:
            with suppress(OSError):
                write(self._sandbox / "cgroup.subtree_control", "-memory")


def of_container(container_id: str, first_pid: int) -> AgentCgroup | None:
    """Return the agent's cgroup of a Docker container, for which `make` may not have been called yet.

    Return None with cgroups version 2: the container's cgroup then contains processes, so it cannot have children.
    """
    try:
        lines = Path(f"/proc/{first_pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"), "")
    folder = Path("/sys/fs/cgroup/memory", path.lstrip("/"))
    return AgentCgroup(folder, is_unified=False) if container_id in path and folder.is_dir() else None


def write(path: Path, value: str) -> None:
    """Write to a file of the kernel."""
    # The mode is not "w": in a folder that is not a cgroup, this must fail instead of creating an ordinary file.
    with path.open("r+") as file:
        file.write(value)
