"""Folders of sandboxes: private, short of name, and named after their owner so that a later run can clear them away.

    /tmp/envkit-<pid namespace>-<pid>-<start time>-<random>/    mode 0700: only the owner's user enters
        process-1/                                              one box, where it needs a folder of the host
            s/                                                  what its sockets are in

The owner of a run's folder is the process that runs it; that of a box which outlives its run is the process that the
box's life hangs on. The path of a Unix socket may have 107 bytes (103 on macOS), which
is why the parent is not a nested cache folder.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from envkit.errors import SandboxError, UnreachableError

_NAME = re.compile(r"envkit-(\d+)-(\d+)-(\d+)(-[^/]+)?")
LEAST_FREE_MIB = 512
"""What must stay free on the disk that holds our folder."""
_EXITING = 0x4
"""The kernel's mark on a process that runs none of its program any more."""
_COMMON = Path("/tmp")
_MAX_ROOT = 40
"""Characters of a parent folder that leave room for the rest of a socket's path."""


def owner_name(pid: int) -> str:
    """The name of what belongs to a process and to no later one with its number."""
    return f"envkit-{_pid_namespace()}-{pid}-{_start_time(pid)}"


def is_owner_gone(name: str) -> bool:
    """Whether `name` is one that begins as `owner_name` says, of a process of this machine that is no more."""
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    namespace, pid, start = (int(part) for part in match.groups()[:3])
    return namespace == _pid_namespace() and (_start_time(pid) != start or _has_ended(pid))


def new_run_folder(pid: int | None = None) -> Path:
    """Make the folder of what belongs to process `pid`, mode 0700, where all processes look; None is this process.

    Raises:
        SandboxError: No place for it can be written to.
    """
    prefix = f"{owner_name(os.getpid() if pid is None else pid)}-"
    for root in roots() if pid is None else common_first():
        try:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        except OSError:
            continue
    raise SandboxError(
        "no folder for sockets: $XDG_RUNTIME_DIR, /tmp and $TMPDIR are missing, not writable or too long"
    )


def of_tail(tail: str) -> Iterator[Path]:
    """The folders of our user whose name ends with `tail`."""
    for root in roots():
        yield from (folder for folder in root.glob(f"envkit-*-*-*-{tail}") if _is_ours(folder))


def gone() -> list[Path]:
    """Return the folders of our user, on this machine, whose owner is gone."""
    found = (folder for root in roots() for folder in root.glob("envkit-*-*-*-*"))
    return [folder for folder in found if is_owner_gone(folder.name) and _is_ours(folder)]


def reap() -> list[Path]:
    """Remove the folders whose owner is gone, and return them; those of other users and other machines stay."""
    found = gone()
    for folder in found:
        remove(folder)
    return found


def remove(folder: Path) -> None:
    """Remove `folder` with all that is in it, also what its owner may not enter; links in it are not followed."""
    with suppress(RecursionError):  # as deep as programs made it, which need not be friendly
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):
            with suppress(FileNotFoundError):
                subprocess.run([*command, "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


def require_space(folder: Path, taking_bytes: int = 0) -> None:
    """Leave something of the host's disk to others.

    Raises:
        OSError: Less than `LEAST_FREE_MIB` would be free where `folder` is, once `taking_bytes` are taken.
    """
    free_mib = (shutil.disk_usage(folder).free - taking_bytes) >> 20
    if free_mib < LEAST_FREE_MIB:
        reason = f"only {max(free_mib, 0)} MiB are free, and {LEAST_FREE_MIB} are left to others"
        raise OSError(errno.ENOSPC, reason, str(folder))


def connect(folder: Path, name: str) -> socket.socket:
    """Return a connected, non-blocking stream to the Unix socket `name` in `folder`.

    What lies in the folder is in the box's hands: a link there, which could lead us to another socket of the host, is
    refused. On Linux the very file that was looked at is connected to, so that it cannot be exchanged in between.

    Raises:
        UnreachableError: There is no such socket, or nobody listens.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UnreachableError(f"{name!r} is not the name of a socket")
    path = folder / name
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.setblocking(False)
    try:
        if sys.platform == "linux":
            handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _require_socket(os.fstat(handle), name)
                stream.connect(f"/proc/self/fd/{handle}")
            finally:
                os.close(handle)
        else:
            _require_socket(path.lstat(), name)
            stream.connect(str(path))
    except BlockingIOError:
        stream.close()
        raise UnreachableError(f"{name}: too many connections wait to be accepted") from None
    except OSError as error:
        stream.close()
        raise UnreachableError(f"{name}: {error.strerror or error}") from None
    except BaseException:
        stream.close()
        raise
    return stream


def roots() -> Iterator[Path]:
    """The folders that run folders may be in, best first."""
    seen = set()
    for name in (os.environ.get("XDG_RUNTIME_DIR"), str(_COMMON), tempfile.gettempdir()):
        if name and len(name) <= _MAX_ROOT and name not in seen and os.access(name, os.W_OK | os.X_OK):
            seen.add(name)
            yield Path(name)


def common_first() -> list[Path]:
    """The `roots`, first that which processes of our user look into whatever their environment."""
    return sorted(roots(), key=lambda root: root != _COMMON)


def _require_socket(found: os.stat_result, name: str) -> None:
    if not stat.S_ISSOCK(found.st_mode):
        raise UnreachableError(f"{name} is not a socket")


def _is_ours(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; -1 when there is no such process.

    Where this cannot be known (macOS), 0 for a living process: its number alone must do.
    """
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return -1
        except PermissionError:
            return 0
        return 0
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return -1
    # The name in the second field may hold anything; the start time is field 22.
    return int(content.rpartition(b")")[2].split()[19])


def _has_ended(pid: int) -> bool:
    """Whether a process that was there just now runs nothing of its program any more.

    It may have been killed and not know it yet, give back its memory, or wait for its parent to take note of its end.
    """
    if sys.platform != "linux":
        return False
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
        signals = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, *_, flags = content.rpartition(b")")[2].split()[:7]
    is_killed = int(signals["SigPnd"], 16) >> (signal.SIGKILL - 1) & 1
    return state in (b"Z", b"X") or bool(int(flags) & _EXITING or is_killed)


def _pid_namespace() -> int:
    """A process number means something only in its namespace; 0 where there are none."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
