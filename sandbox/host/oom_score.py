"""Make two files writable in a container whose ``/proc`` and cgroup file systems are otherwise read-only.

The first is the ``oom_score_adj`` of process 1, through which process 1 sets the OOM score that its children inherit.
Other processes in the container cannot lower their scores. The second is the file through which a process moves itself
into the agent's memory cgroup. This needs root on the host and Linux 5.2.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from .pid1 import FirstProcess
from .remount import call

_OPEN_TREE = 428  # from 424 on, system calls have the same number on every architecture
_MOVE_MOUNT = 429
_AT_FDCWD = -100
_CLONE = 1
_FROM_EMPTY_PATH = 4
_CLONE_FS = 0x200
_CLONE_NEWNS = 0x20000


def lend(first: FirstProcess, more: Mapping[str, str]) -> None:
    """Make process 1's ``oom_score_adj`` and other host files writable in a container, by bind mounts.

    Args:
        first: Process 1 of the container.
        more: The other files: keys are paths on the host, values are paths in the container.

    Raises:
        OSError: The kernel does not support or refuses the system calls, or the process has exited.
    """
    # Use a new thread, which ends afterwards: a thread cannot leave the mount namespace that it has entered.
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
        first.require_life()  # if process 1 still runs, its pid was not reused while the files were opened
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_FS) or libc.setns(namespace, _CLONE_NEWNS):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        for target, copy in copies.items():
            call(_MOVE_MOUNT, copy, b"", _AT_FDCWD, target.encode(), _FROM_EMPTY_PATH)
