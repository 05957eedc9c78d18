"""Change the mount options of a file system in another process's mount namespace, such as a sandbox's tmpfs, without
entering that namespace. Needs root on the host and Linux 5.2.
namespace. Needs root on the host and Linux 5.2.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

_FSCONFIG = 431  # these two numbers are the same on every architecture
_FSPICK = 433
_AT_FDCWD = -100
_CLOEXEC = 1
_SET_FLAG, _SET_STRING, _RECONFIGURE = 0, 1, 7


def reconfigure(mount: Path, options: Mapping[str, str]) -> None:
    """Change the options of the file system mounted at `mount`, for every process that sees it.

    Tmpfs keeps options that are not named; devpts resets them to its defaults.

    Args:
        mount: Root of the mount, such as ``/proc/PID/root/tmp`` or `FirstProcess.folder("/tmp")`.
        options: Names and values, such as ``{"nr_inodes": "16384"}``; an empty value sets a flag.

    Raises:
        OSError: The kernel lacks or refuses the call, or nothing is mounted there.
    """
    picked = call(_FSPICK, _AT_FDCWD, os.fsencode(mount), _CLOEXEC)
    try:
        for name, value in options.items():
            kind = _SET_STRING if value else _SET_FLAG
            call(_FSCONFIG, picked, kind, name.encode(), value.encode() if value else None, 0)
        call(_FSCONFIG, picked, _RECONFIGURE, None, None, 0)
    finally:
        os.close(picked)


def call(number: int, *arguments: int | bytes | None) -> int:
    """Make the system call `number` and return its result. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
