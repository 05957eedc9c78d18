"""Change mount options, such as the size of a tmpfs, in a sandbox's mount namespace without entering the namespace.

This needs root on the host and Linux 5.2.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

_FSCONFIG = 431  # from 424 on, system calls have the same number on every architecture
_FSPICK = 433
_AT_FDCWD = -100
_CLOEXEC = 1
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
    picked = call(_FSPICK, _AT_FDCWD, os.fsencode(mount), _CLOEXEC)
    try:
        for name, value in options.items():
            kind = _SET_STRING if value else _SET_FLAG
            call(_FSCONFIG, picked, kind, name.encode(), value.encode() if value else None, 0)
        call(_FSCONFIG, picked, _RECONFIGURE, None, None, 0)
    finally:
        os.close(picked)


def call(number: int, *arguments: int | bytes | None) -> int:
    """Make the system call `number` and return its result; raise `OSError` if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
