"""Gives each bubblewrap sandbox a separate range of host uids, by means of a user namespace (as root only).

The kernel limits many resources (inotify instances, queued signals and timers, memory of pipes and message queues) per
user. What is used in a user namespace also counts for the user that created the namespace. Each namespace is therefore
created as a uid of its own range, so a sandbox does not use up the limits of other sandboxes or of real accounts.

Uid 0 in a namespace is the host's root, because bubblewrap must mount files that only root can reach. It has no
capabilities outside the namespace. Uids 1 to 4094 and 65534 (nobody) map into the namespace's range. No other uids
exist in the namespace.

The ranges are between 2,000,683,008 and 2,147,352,575, which systemd, sssd and ``/etc/subuid`` do not use by default.
A range is reserved by an open abstract Unix socket whose name contains the first uid. Process 1 of the sandbox inherits
the socket. When the sandbox and the process that started the sandbox have both ended, the kernel closes the socket,
which frees the range.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from ..host.layout import SHARED_PER_UID
from . import arguments

FIRST = 2_000_683_008
SIZE = 4096
COUNT = 35_808
_NOBODY = 65_534


class UidRange:
    """A range of host uids, and the user namespace whose uids map to the range.

    Args:
        base: First uid of the range. A process with this uid creates the namespace, in which no uid maps to it.
        lock: The socket that reserves the range; `close` closes it.
        ranges: Pool to which `recycle` returns the range; None if `recycle` closes the range.

    Attributes:
        namespace: File descriptor of the user namespace.
        lock: The socket that reserves the range.

    Raises:
        OSError: The kernel refuses the namespace, or a program of util-linux is missing.
    """

    def __init__(self, base: int, lock: socket.socket, ranges: UidRanges | None) -> None:
        self.lock = lock
        self.namespace = _new_namespace(base)
        self._ranges = ranges

    def recycle(self) -> None:
        """Make the range available to another sandbox. All processes of its last sandbox must have ended."""
        if self._ranges is None or self._ranges.why_none is not None:
            self.close()
        else:
            self._ranges.free.append(self)

    def close(self) -> None:
        """Close this process's descriptors. The range becomes free when no sandbox uses it any more."""
        self.lock.close()
        os.close(self.namespace)


class UidRanges:
    """The uid ranges of one backend. They are reused after their sandboxes have ended, since creating one takes 3 ms.

    Attributes:
        why_none: One line that says why ranges are not available; None if they are available.
        free: Ranges that no sandbox uses.
    """

    def __init__(self) -> None:
        self.why_none: str | None = "the backend is not open"
        self.free: list[UidRange] = []

    def take(self) -> UidRange | None:
        """Return a range that no other sandbox on this machine uses; None if ranges are not available.

        Blocks for some milliseconds.

        Raises:
            OSError: All ranges are in use, or the kernel refuses the namespace.
        """
        if self.why_none is not None:
            return None
        try:
            return self.free.pop()
        except IndexError:
            return _new_range(self)

    def close(self) -> None:
        """Close the free ranges now. A range that is in use is closed when its sandbox has ended."""
        self.why_none = "the backend is closed"
        while self.free:
            self.free.pop().close()


def why_unavailable() -> str | None:
    """Return one line that says why sandboxes cannot have separate uid ranges on this machine; None if they can.

    Blocks for some milliseconds.
    """
    if os.geteuid() != 0:
        return "separate uids for each sandbox need root"
    try:
        _try_once()
    except OSError as error:
        return f"no user namespace for each sandbox: {error}"
    return None


def shared() -> tuple[str, ...]:
    """Return names of the kernel resources that sandboxes share with each other and with users of the host.

    Blocks for some milliseconds.
    """
    if why_unavailable() is None:
        return ()
    return SHARED_PER_UID if os.geteuid() == 0 else (*SHARED_PER_UID, "terminals")


@lru_cache(maxsize=1)
def _try_once() -> None:
    """Check that a sandbox can be started in a new uid range; raise `OSError` if not. Success is cached."""
    with closing(_new_range()) as made:
        if (why := arguments.why_unavailable(made.namespace)) is not None:
            raise OSError(why)


def _new_range(ranges: UidRanges | None = None) -> UidRange:
    start = random.randrange(COUNT)
    for number in range(start, start + COUNT):
        base = FIRST + number % COUNT * SIZE
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0envkit-uids-{base}")
            return UidRange(base, lock, ranges)
        except BaseException as error:
            lock.close()
            if not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EUSERS, f"all {COUNT} uid ranges for sandboxes are in use; stop sandboxes first")


def _new_namespace(base: int) -> int:
    """Return the descriptor of a new user namespace. Uid `base` creates it, and its uids map to those after `base`."""
    argv = ["setpriv", f"--reuid={base}", f"--regid={base}", "--clear-groups", "unshare", "--user", "cat"]
    pipe = subprocess.PIPE
    env = {"PATH": os.environ.get("PATH", os.defpath)}
    with subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env=env) as made:
        # `cat` echoes the line below as soon as it runs in the namespace. It exits when its input is closed.
        answer: bytes | None = b""
        assert made.stdin is not None
        assert made.stdout is not None
        assert made.stderr is not None
        try:
            made.stdin.write(b"\n")
            answer = made.stdout.read(1)
        except BrokenPipeError:
            pass
        if not answer:
            raise OSError(made.stderr.read().decode(errors="replace").strip() or "unshare exited")
        for name in ("uid_map", "gid_map"):
            entries = f"0 0 1\n1 {base + 1} {SIZE - 2}\n{_NOBODY} {base + SIZE - 1} 1\n"
            Path(f"/proc/{made.pid}/{name}").write_text(entries)
        return os.open(f"/proc/{made.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
