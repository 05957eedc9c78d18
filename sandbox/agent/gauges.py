"""Reads a sandbox's memory use, disk use, OOM kills and hits of memory limits. Works only in process 1 of a sandbox."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .framing import Json

_EVENTS = "/sys/fs/cgroup/memory.events"
"""File with the counts of memory events (cgroup v2)."""
_MEMORY_GROUPS = ("/sys/fs/cgroup/memory/", "/sys/fs/cgroup/memory/agent/")
"""The memory cgroups (v1) of the sandbox and, inside it, of the agent user. Neither counts the kills of the other."""
_KILL_COUNTS = (_EVENTS, *(folder + "memory.oom_control" for folder in _MEMORY_GROUPS))
_HUGE_PAGE_BYTES = 2 << 20
"""Size of a huge page, the kernel's largest allocation. When a memory limit is hit, less than this is free."""
_WRITABLE = ("/workspace", "/tmp")
_MEMORY_IN_USE = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def fullest() -> dict[str, Json]:
    """Return which writable file system is fullest (``disk_place``) and how full it is (``disk_percent``).

    The result is empty if neither ``/workspace`` nor ``/tmp`` is a file system of its own.
    """
    found: dict[str, Json] = {}
    peak = -1
    for path in _WRITABLE if os.getpid() == 1 else ():
        try:
            # Skip a path on the root file system, because the host measures how full that is.
            if os.stat(path).st_dev == os.stat("/").st_dev:
                continue
            size = os.statvfs(path)
        except OSError:
            continue
        shares = ((size.f_blocks, size.f_bfree), (size.f_files, size.f_ffree))
        percent = max(100 * (whole - free) // whole if whole else 0 for whole, free in shares)
        if percent > peak:
            peak = percent
            found = {"disk_place": path, "disk_percent": percent}
    return found


def kill_count() -> int | None:
    """Return the number of OOM kills in the sandbox; None if the sandbox's cgroup is not visible."""
    counts = []
    for path in _KILL_COUNTS if os.getpid() == 1 else ():
        for line in (_read(path) or b"").splitlines():
            name, _, count = line.partition(b" ")
            if name == b"oom_kill":
                counts.append(int(count))
    return sum(counts) if counts else None


def limit_hits() -> int:
    """Return how often memory ran out because of a limit: that of the sandbox, or that of the agent user's programs.

    With cgroup v1, return instead how many of the two limits were hit since the host last reset the peak memory use.
    """
    for line in (_read(_EVENTS) or b"").splitlines():
        if line.startswith(b"oom "):
            return int(line[4:])
    count = 0
    for folder in _MEMORY_GROUPS:
        peak, limit = (_read(folder + name) for name in ("memory.max_usage_in_bytes", "memory.limit_in_bytes"))
        count += bool(peak and limit and int(peak) >= int(limit) - _HUGE_PAGE_BYTES)
    return count


def memory_in_use() -> int | None:
    """Return the sandbox's memory use in bytes; None if the sandbox's cgroup is not visible."""
    found = [_read(path) for path in _MEMORY_IN_USE] if os.getpid() == 1 else []
    return next((int(text) for text in found if text is not None), None)


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None
