"""Finds and kills orphans of bubblewrap: children of a bubblewrap process that was killed while it started a sandbox.

Bubblewrap forks the child that becomes the sandbox, and the child waits on a pipe before it sets its parent-death
signal. If bubblewrap is killed during this time, the child waits forever, without a cgroup or a run directory. We start
bubblewrap with the name of the sandbox's cgroup as argv[0]; the child has the same argv[0] and is recognised by it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from envkit.runs import owners


def find() -> list[int]:
    """Return the pids of the orphans on this machine: bubblewrap children whose envkit process has ended.

    An orphan's argv[0] names its envkit process, and an orphan is not a session leader. A running sandbox does not
    match: its agent has another argv[0]. Bubblewrap's first process does not match: it is a session leader.
    """
    return [pid for pid, name in _named() if owners.is_owner_gone(name) and _is_led(pid)]


def reap() -> list[int]:
    """Kill the orphans and return their pids."""
    found = find()
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _named() -> Iterator[tuple[int, str]]:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                name = (process / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
                if name.startswith("envkit-") and process.stat().st_uid == os.geteuid():
                    yield int(process.name), name


def _is_led(pid: int) -> bool:
    try:
        return os.getsid(pid) != pid
    except ProcessLookupError:
        return False
