"""The memory cgroup of the agent's programs, a child of their sandbox's cgroup with a lower limit.

The difference between the limits is reserved for process 1 and graders, which stay outside the child. Memory that no
process owns (System V shared memory, unread socket buffers, inodes of empty files) is charged to the programs that
allocated it, so they run out of memory in their own cgroup, and the kernel kills only there.

Process 1 moves each process that it forks for the agent into the child. It sees the cgroup file system read-only,
except for the one file that moves the writer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_AGENT = "agent"
_FIRST = "first"
"""With version 2: the cgroup of process 1 and graders, since a cgroup with children may not contain processes."""
_MIN_MIB, _MAX_MIB = 32, 64
INSIDE = "/sys/fs/cgroup/memory/agent/tasks"
"""Path, in a container, of the file by which process 1 moves itself."""


def reserve_mib(memory_mib: int) -> int:
    """Return the MiB reserved from the agent: 1/8 of the limit, at least 32 and at most 64, never over 1/4.

    Args:
        memory_mib: The sandbox's limit, MiB.
    """
    return min(max(memory_mib // 8, _MIN_MIB), _MAX_MIB, memory_mib // 4)


class AgentCgroup:
    """The child of one sandbox's memory cgroup.

    Args:
        sandbox: Folder of the sandbox's cgroup.
        is_unified: Whether it is of version 2.

    Attributes:
        folder: Its own folder, which need not exist.
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
        """The cgroups that exist below the sandbox's."""
        return [folder for folder in (self.folder, self._sandbox / _FIRST) if folder.is_dir()]

    @property
    def first_folder(self) -> Path:
        """The cgroup of process 1."""
        return self._sandbox / _FIRST if self._is_unified and self.exists else self._sandbox

    @property
    def join_file(self) -> Path:
        """The file that moves the single-threaded process that writes "0" to it."""
        # In version 1, moving a single thread takes no global lock.
        return self.folder / ("cgroup.procs" if self._is_unified else "tasks")

    def make(self, memory_mib: int) -> None:
        """Create it; with version 2, before any process is in the sandbox's cgroup.

        Args:
            memory_mib: The sandbox's limit, MiB.

        Raises:
            OSError: The kernel refuses; nothing is left behind.
        """
        limit = str(memory_mib - reserve_mib(memory_mib) << 20)
        try:
            if self._is_unified:
                _write(self._sandbox / "cgroup.subtree_control", "+memory")
                (self._sandbox / _FIRST).mkdir(exist_ok=True)
            self.folder.mkdir(exist_ok=True)
            if self._is_unified:
                _write(self.folder / "memory.max", limit)
            else:
                _write(self.folder / "memory.limit_in_bytes", limit)
                with suppress(FileNotFoundError):  # the kernel does not account swap
                    _write(self.folder / "memory.memsw.limit_in_bytes", limit)
        except OSError:
            self.remove()
            raise

    def forget_peaks(self) -> None:
        """Reset the peak memory use of both cgroups; not with version 2, which counts limit hits instead."""
        for folder in () if self._is_unified else (self._sandbox, self.folder):
            with suppress(OSError):
                _write(folder / "memory.max_usage_in_bytes", "0")

    def remove(self) -> None:
        """Remove it unless a process is in it."""
        for folder in self.folders:
            with suppress(OSError):
                folder.rmdir()
        if self._is_unified and not self.folders:
            with suppress(OSError):
                _write(self._sandbox / "cgroup.subtree_control", "-memory")


def of_container(container_id: str, first_pid: int) -> AgentCgroup | None:
    """Return the agent's cgroup of a container, which need not exist; None if the container cannot have one.

    It cannot with version 2, where the container's own processes are in its cgroup.

    Args:
        container_id: The daemon's id of the container.
        first_pid: Host pid of its process 1.
    """
    try:
        lines = Path(f"/proc/{first_pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"), "")
    folder = Path("/sys/fs/cgroup/memory", path.lstrip("/"))
    return AgentCgroup(folder, is_unified=False) if container_id in path and folder.is_dir() else None


def _write(file: Path, value: str) -> None:
    # Without O_CREAT, so that this fails instead of creating a file if the folder is not a cgroup.
    handle = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, value.encode())
    finally:
        os.close(handle)
