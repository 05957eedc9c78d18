"""Make two files writable for process 1 of a container that sees their file systems read-only.

They are its own ``oom_score_adj`` (children inherit the score, and no other process in the container can lower one)
and the file that moves the writing process into the agent's memory cgroup. Needs root on the host and Linux 5.2.
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
    """Mount the ``oom_score_adj`` of `first` over itself, writable, in its mount namespace. Blocks for under 1 ms.

    Args:
        first: Process 1 of the container.
        more: Further files: host path to path inside.

    Raises:
        OSError: The kernel lacks or refuses the calls, or the process has exited.
    """
    # A thread that enters another mount namespace stays there, so use one that ends afterwards.
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
        first.require_life()  # if it is alive now, the pid was not reused while the files were opened
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_FS) or libc.setns(namespace, _CLONE_NEWNS):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        for target, copy in copies.items():
            call(_MOVE_MOUNT, copy, b"", _AT_FDCWD, target.encode(), _FROM_EMPTY_PATH)
