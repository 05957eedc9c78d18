"""Change mounts of a running sandbox from the host: their options, and which files of ``/proc`` are writable.

This needs root on the host and Linux 5.2.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

# From 424 on, system calls have the same number on every architecture.
_OPEN_TREE = 428
_MOVE_MOUNT = 429
_FSCONFIG = 431
_FSPICK = 433
_AT_FDCWD = -100
_CLOEXEC = 1
_CLONE = 1
_FROM_EMPTY_PATH = 4
_CLONE_FS = 0x200
_CLONE_NEWNS = 0x20000
_SET_FLAG, _SET_STRING, _RECONFIGURE = 0, 1, 7


def reconfigure(mount: Path, options: Mapping[str, str]) -> None:
    """Change options of the file system that is mounted at `mount`. The change applies to all processes.

    Options that `options` does not name remain as they are in a tmpfs, but return to their defaults in a devpts.

    Args:
        mount: Mount point, such as ``/proc/PID/root/tmp`` or `FirstProcess.folder("/tmp")`.
        options: Values by name of the option, such as ``{"nr_inodes": "16384"}``. An empty value sets a flag.

    Raises:
        OSError: The kernel does not support or refuses the call, or nothing is mounted at `mount`.
    """
    picked = _call(_FSPICK, _AT_FDCWD, os.fsencode(mount), _CLOEXEC)
    try:
        for name, value in options.items():
            kind = _SET_STRING if value else _SET_FLAG
            _call(_FSCONFIG, picked, kind, name.encode(), value.encode() if value else None, 0)
        _call(_FSCONFIG, picked, _RECONFIGURE, None, None, 0)
    finally:
        os.close(picked)


def enter_and_mount(pid: int, require_life: Callable[[], None], files: Mapping[str, str]) -> None:
    """Move this thread into the mount namespace of process `pid`, and mount `files` of the host at their paths there.

    `require_life` raises `ProcessLookupError` if the process has exited.
    """
    with ExitStack() as opened:
        namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, namespace)
        copies: dict[str, int] = {}
        for source, target in files.items():
            copies[target] = _call(_OPEN_TREE, _AT_FDCWD, source.encode(), _CLONE | os.O_CLOEXEC)
            opened.callback(os.close, copies[target])
        require_life()  # if process 1 still runs, its pid was not reused while the files were opened
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_FS) or libc.setns(namespace, _CLONE_NEWNS):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        for target, copy in copies.items():
            _call(_MOVE_MOUNT, copy, b"", _AT_FDCWD, target.encode(), _FROM_EMPTY_PATH)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """Make the system call `number` and return its result; raise `OSError` if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
