"""Names of the folders and processes that a process owns, by which later processes know that it has ended."""

from __future__ import annotations

import re
import signal
from pathlib import Path

_NAME = re.compile(r"envkit-(\d+)-(\d+)-(\d+)(-[^/]+)?")
_EXITING = 0x4
"""Process flag PF_EXITING of the Linux kernel."""


def owner_name(pid: int) -> str:
    """Return a name that identifies the process `pid`. A later process with the same pid has a different name."""
    return f"envkit-{_pid_namespace()}-{pid}-{_start_time(pid)}"


def is_owner_gone(name: str) -> bool:
    """Whether `name` starts with the `owner_name` of a process that ran in this pid namespace and has ended."""
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    namespace, pid, start = (int(part) for part in match.groups()[:3])
    return namespace == _pid_namespace() and (_start_time(pid) != start or _has_ended(pid))


def _start_time(pid: int) -> int:
    """Return the start time of the process `pid` in clock ticks since boot; -1 if there is no such process."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return -1
    # Field 2, the process's name in parentheses, may contain spaces and parentheses. The start time is field 22.
    return int(content.rpartition(b")")[2].split()[19])


def _has_ended(pid: int) -> bool:
    """Whether the existing process `pid` no longer runs its program: it is being killed, is exiting, or is a zombie."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
        signals = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, *_, flags = content.rpartition(b")")[2].split()[:7]
    is_killed = int(signals["SigPnd"], 16) >> (signal.SIGKILL - 1) & 1
    return state in (b"Z", b"X") or bool(int(flags) & _EXITING or is_killed)


def _pid_namespace() -> int:
    """Return the id of this process's pid namespace; 0 if the system has no pid namespaces."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
