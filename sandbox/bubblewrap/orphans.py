"""Boxes that were never born: what bubblewrap leaves when it is killed at a certain moment.

It starts the process that becomes the box, and that waits for a word from it. Only then does it ask the kernel to end
that process with itself: if it is killed before, the process waits for ever, in no group and without a file of ours. So
bubblewrap goes by the name of the box's control group, by which the process is known.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..host import run_dirs


def find() -> list[int]:
    """Return the processes that wait so, on this machine, or are about to, of boxes whose owner is gone.

    What is a box by now has become our agent, by another name. Bubblewrap itself, which leads the session, stays with
    its box.
    """
    return [pid for pid, name in _named() if run_dirs.is_owner_gone(name) and _is_led(pid)]


def reap() -> list[int]:
    """End them, and return them."""
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
