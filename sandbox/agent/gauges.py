"""Memory in use, OOM kills, hits of the memory limit, and disk use of a sandbox; only its process 1 can read them."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .json_fallback import Json

_EVENTS = "/sys/fs/cgroup/memory.events"
"""Of version 2."""
_MEMORY_GROUPS = ("/sys/fs/cgroup/memory/", "/sys/fs/cgroup/memory/agent/")
"""Of version 1, where a group does not count what is killed in those below it."""
_KILL_COUNTS = (_EVENTS, *(folder + "memory.oom_control" for folder in _MEMORY_GROUPS))
_HUGE_PAGE_BYTES = 2 << 20
"""The largest piece of memory that is asked for at once, and so what may be left of a limit that refused it."""
_WRITABLE = ("/workspace", "/tmp")
_MEMORY_IN_USE = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def fullest() -> dict[str, Json]:
    """Return which place with a bound of its own is the fullest, and how many percent of it are used."""
    found: dict[str, Json] = {}
    most = -1
    for place in _WRITABLE if os.getpid() == 1 else ():
        try:
            if os.stat(place).st_dev == os.stat("/").st_dev:  # a part of the whole, which others bound
                continue
            size = os.statvfs(place)
        except OSError:
            continue
        shares = ((size.f_blocks, size.f_bfree), (size.f_files, size.f_ffree))
        percent = max(100 * (whole - free) // whole if whole else 0 for whole, free in shares)
        if percent > most:
            most = percent
            found = {"disk_place": place, "disk_percent": percent}
    return found


def kill_count() -> int | None:
    """Return how often something in the box was killed because memory ran out, where its kernel group is visible."""
    counts = []
    for path in _KILL_COUNTS if os.getpid() == 1 else ():
        for line in (_content(path) or b"").splitlines():
            name, _, count = line.partition(b" ")
            if name == b"oom_kill":
                counts.append(int(count))
    return sum(counts) if counts else None


def limit_hits() -> int:
    """Return how often the sandbox, or its agent's programs, ran out of memory at their own limit.

    With version 1, return how many of its memory cgroups came to their limit since the host last reset their peaks.
    """
    for line in (_content(_EVENTS) or b"").splitlines():
        if line.startswith(b"oom "):
            return int(line[4:])
    count = 0
    for folder in _MEMORY_GROUPS:
        most, limit = (_content(folder + name) for name in ("memory.max_usage_in_bytes", "memory.limit_in_bytes"))
        count += bool(most and limit and int(most) >= int(limit) - _HUGE_PAGE_BYTES)
    return count


def memory_in_use() -> int | None:
    """Return the bytes of memory that the box has, where its kernel group is visible."""
    found = [_content(path) for path in _MEMORY_IN_USE] if os.getpid() == 1 else []
    return next((int(text) for text in found if text is not None), None)


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None
