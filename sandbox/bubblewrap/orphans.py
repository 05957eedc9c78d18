"""Reap child processes that bubblewrap orphans if it is killed before it sets their parent-death signal.

Bubblewrap forks the process that becomes the sandbox and lets it wait on a pipe. Only then does that process ask the
kernel to end it with its parent. If bubblewrap is killed before, the child waits forever, without a cgroup or a run
directory. It is recognised by its argv[0], which bubblewrap is given: the name of the sandbox's cgroup.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..host import run_dirs


def find() -> list[int]:
    """Return the pids of such orphans on this machine: of sandboxes whose owner has ended.

    In a running sandbox the process has become our agent, with another name. Bubblewrap itself, the session leader,
    is not included.
    """
    return [pid for pid, name in _named() if run_dirs.is_owner_gone(name) and _is_led(pid)]


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
