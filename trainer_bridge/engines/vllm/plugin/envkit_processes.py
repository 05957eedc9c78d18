"""Finds and ends the processes of a vLLM server, which are in a session and process group of their own.

envkit uses this module, and so does the supervisor of a server, which may run in a virtual environment without envkit.
So it imports nothing of envkit.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

TERM_S = 10.0
"""Seconds for processes to end after SIGTERM."""
_KILL_S = 4.0
"""Seconds for processes to end after SIGKILL, and for the resource tracker when the others have been killed."""
_POLL_S = 0.1
_TRACKER = b"multiprocessing.resource_tracker"
"""Part of the command line of the process that removes the shared memory of the others when they have ended."""


def end_group(group: int, *, term_s: float = TERM_S) -> None:
    """End all processes of `group` except this one: SIGTERM, and after `term_s` seconds SIGKILL.

    The process that removes shared memory gets SIGKILL last, and only if it does not end after the others.
    """
    _signal(members(group), signal.SIGTERM, signal.SIGCONT)
    if not wait_gone(group, term_s):
        _signal([pid for pid in members(group) if not _is_tracker(pid)], signal.SIGKILL)
        if not wait_gone(group, _KILL_S):
            _signal(members(group), signal.SIGKILL)
            wait_gone(group, _KILL_S)


def wait_gone(group: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds until `group` has no process but this one; return whether that is so."""
    end_s = time.monotonic() + timeout_s
    while members(group):
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
    return True


def members(group: int) -> list[int]:
    """Return the pids of this user's processes in the session and process group `group`.

    Zombies and the calling process are left out.
    """
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if pid != os.getpid() and _is_member(pid, group)]


def _signal(pids: list[int], *numbers: signal.Signals) -> None:
    for pid in pids:
        for number in numbers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _is_member(pid: int, group: int) -> bool:
    fields = _stat(pid)
    if fields is None or fields[2:4] != [str(group), str(group)]:
        return False
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
    return False


def _is_tracker(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on; None if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields
