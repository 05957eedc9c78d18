"""Let the first process of a sandbox change its own ``oom_score_adj`` though the sandbox sees /proc read-only.

Nobody else in it can then lower a score, and children inherit theirs. Needs root on the host and Linux 5.2.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

from .pid1 import FirstProcess
from .remount import call

_OPEN_TREE = 428  # these two numbers are the same on every architecture
_MOVE_MOUNT = 429
_AT_FDCWD = -100
_CLONE = 1
_FROM_EMPTY_PATH = 4
_CLONE_FS = 0x200
_CLONE_NEWNS = 0x20000


def lend(first: FirstProcess) -> None:
    """Mount the file over itself, writable, in the sandbox whose first process is `first`. Blocks for under 1 ms.

    Raises:
        OSError: The kernel lacks the calls or refuses them, or the process is gone.
    """
    # In a thread of its own, which ends: one that has entered another mount namespace stays there.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_enter_and_mount, first).result()


def _enter_and_mount(first: FirstProcess) -> None:
    namespace = os.open(f"/proc/{first.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        place = f"/proc/{first.pid}/oom_score_adj".encode()
        copy = call(_OPEN_TREE, _AT_FDCWD, place, _CLONE | os.O_CLOEXEC)
        try:
            first.require_life()  # now both were of that process, and not of a later one with its number
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(_CLONE_FS) or libc.setns(namespace, _CLONE_NEWNS):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            call(_MOVE_MOUNT, copy, b"", _AT_FDCWD, b"/proc/1/oom_score_adj", _FROM_EMPTY_PATH)
        finally:
            os.close(copy)
    finally:
        os.close(namespace)
