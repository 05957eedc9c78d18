"""Create, find and remove run directories, which contain the sockets and other host files of sandboxes.

    /tmp/envkit-<pid namespace>-<pid>-<start time>-<random>/    run directory of one process, mode 0700
        process-1/                                              directory of one sandbox, if it needs one on the host
            s/                                                  the sandbox's sockets

The pid and start time in the name identify the owner: the process that opened the backend or, for a detached sandbox,
the process that supervises the sandbox. A later process can thus remove the directories whose owner has ended. The
paths are short because the path of a Unix socket is limited to 107 bytes.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from envkit.errors import SandboxError, UnreachableError
from envkit.runs.owners import is_owner_gone, owner_name

LEAST_FREE_MIB = 512
"""MiB that must stay free on the disk of the run directory."""
_COMMON = Path("/tmp")
_MAX_ROOT = 40
"""Maximum characters in the path of a run directory's parent. The rest of a socket's path needs the other bytes."""


def new_run_folder(pid: int | None = None) -> Path:
    """Create a run directory that belongs to the process `pid`; None means this process.

    Raises:
        SandboxError: No parent directory is writable.
    """
    prefix = f"{owner_name(os.getpid() if pid is None else pid)}-"
    # Processes with other environment variables search in /tmp, too, so for another process it is the first choice.
    for root in roots() if pid is None else sorted(roots(), key=lambda root: root != _COMMON):
        try:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        except OSError:
            continue
    raise SandboxError(
        "no directory for sockets: $XDG_RUNTIME_DIR, /tmp and $TMPDIR are missing, not writable or longer than"
        f" {_MAX_ROOT} characters; set XDG_RUNTIME_DIR"
    )


def of_tail(tail: str) -> Iterator[Path]:
    """Yield the run directories of this user whose name ends with `tail`."""
    for root in roots():
        yield from (folder for folder in root.glob(f"envkit-*-*-*-{tail}") if _is_ours(folder))


def gone() -> list[Path]:
    """Return the run directories of this user whose owner process has ended."""
    found = (folder for root in roots() for folder in root.glob("envkit-*-*-*-*"))
    return [folder for folder in found if is_owner_gone(folder.name) and _is_ours(folder)]


def reap() -> list[Path]:
    """Remove the directories that `gone` returns, and return their paths."""
    found = gone()
    for folder in found:
        remove(folder)
    return found


def remove(folder: Path) -> None:
    """Remove `folder` with its contents, even if file modes forbid it. Symbolic links are removed, not followed."""
    with suppress(RecursionError):  # a sandbox's programs may nest folders too deeply for rmtree
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):
            with suppress(FileNotFoundError):
                subprocess.run([*command, "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


def require_space(folder: Path, taking_bytes: int = 0) -> None:
    """Raise an error unless the host's disk has enough free space.

    Raises:
        OSError: Less than `LEAST_FREE_MIB` would be free on the disk of `folder` after writing `taking_bytes` to it.
    """
    free_mib = (shutil.disk_usage(folder).free - taking_bytes) >> 20
    if free_mib < LEAST_FREE_MIB:
        reason = f"only {max(free_mib, 0)} MiB would be free (minimum {LEAST_FREE_MIB}); free disk space"
        raise OSError(errno.ENOSPC, reason, str(folder))


def connect(folder: Path, name: str) -> socket.socket:
    """Return a non-blocking socket that is connected to the Unix socket `name` in `folder`.

    Symbolic links are refused: programs in the sandbox can write to the folder, and could link to any socket of the
    host. The connection goes to the inode that was checked, so that a later replacement has no effect.

    Raises:
        UnreachableError: There is no such socket, or no process listens on it.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UnreachableError(f"{name!r} is not the name of a socket")
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.setblocking(False)
    try:
        handle = os.open(folder / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not stat.S_ISSOCK(os.fstat(handle).st_mode):
                raise UnreachableError(f"{name} is not a socket")
            stream.connect(f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)
    except BlockingIOError:
        stream.close()
        raise UnreachableError(f"{name}: the listen queue is full; retry later") from None
    except OSError as error:
        stream.close()
        raise UnreachableError(f"{name}: {error.strerror or error}") from None
    except BaseException:
        stream.close()
        raise
    return stream


def roots() -> Iterator[Path]:
    """Yield the writable folders in which run directories may be created, the preferred one first."""
    seen = set()
    for name in (os.environ.get("XDG_RUNTIME_DIR"), str(_COMMON), tempfile.gettempdir()):
        if name and len(name) <= _MAX_ROOT and name not in seen and os.access(name, os.W_OK | os.X_OK):
            seen.add(name)
            yield Path(name)


def _is_ours(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
