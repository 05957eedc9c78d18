"""Make single files writable for the first process of a container that sees their file systems read-only.

They are its own ``oom_score_adj`` (nobody else in it can then lower a score, and children inherit theirs) and the one
that moves its writer into the agent's memory cgroup. Needs root on the host and Linux 5.2.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from .pid1 import FirstProcess
from .remount import call

_OPEN_TREE = 428  # these two numbers are the same on every architecture
_MOVE_MOUNT = 429
_AT_FDCWD = -100
_CLONE = 1
_FROM_EMPTY_PATH = 4
_CLONE_FS = 0x200
_CLONE_NEWNS = 0x20000


def lend(first: FirstProcess, more: Mapping[str, str]) -> None:
    """Mount its ``oom_score_adj`` over itself, writable, in the mount namespace of `first`. Blocks for under 1 ms.

    Args:
        first: The first process.
        more: Further files of the host, and where they are mounted inside.

    Raises:
        OSError: The kernel lacks the calls or refuses them, or the process is gone.
    """
    # In a thread of its own, which ends: one that has entered another mount namespace stays there.
    with ThreadPoolExecutor(1) as thread:
        files = {f"/proc/{first.pid}/oom_score_adj": "/proc/1/oom_score_adj", **more}
        thread.submit(_enter_and_mount, first, files).result()


def _enter_and_mount(first: FirstProcess, files: Mapping[str, str]) -> None:
    with ExitStack() as opened:
        namespace = os.open(f"/proc/{first.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, namespace)
        copies: dict[str, int] = {}
        for source, target in files.items():
            copies[target] = call(_OPEN_TREE, _AT_FDCWD, source.encode(), _CLONE | os.O_CLOEXEC)
            opened.callback(os.close, copies[target])
        first.require_life()  # now all were of that process, and not of a later one with its number
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_FS) or libc.setns(namespace, _CLONE_NEWNS):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        for target, copy in copies.items():
            call(_MOVE_MOUNT, copy, b"", _AT_FDCWD, target.encode(), _FROM_EMPTY_PATH)
