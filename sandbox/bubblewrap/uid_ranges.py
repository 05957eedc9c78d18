"""A range of host uids for each bubblewrap sandbox, by a user namespace that root creates beforehand.

The kernel counts many limited resources (inotify instances, queued signals and timers, memory of pipes and message
queues) per user, and also for the user who created that user's namespace. Each namespace here is created by a uid of
its own range, so a sandbox takes nothing from other sandboxes or from real accounts.

Inside, uid 0 is the host's root, so that bubblewrap can mount what only root can reach; it has no capability outside
the namespace. Uids 1 to 4094 and 65534 (nobody) map into the range; others do not exist.

Ranges are between 2,000,683,008 and 2,147,352,575, which systemd, sssd and ``/etc/subuid`` do not use by default. A
process owns a range while it holds an abstract Unix socket named after it. Process 1 of the sandbox inherits the
socket, so the kernel frees the range when the sandbox and its starter have ended, however they ended.
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
    """A range of host uids and its user namespace.

    Args:
        base: Its first uid, which creates the namespace and is not used in it.
        lock: The socket that reserves the range; closed by `close`.
        ranges: Free list to return to after use; None closes the range instead.

    Attributes:
        namespace: File descriptor of the user namespace.
        lock: The socket.

    Raises:
        OSError: The kernel refuses, or a program of util-linux is missing.
    """

    def __init__(self, base: int, lock: socket.socket, ranges: UidRanges | None) -> None:
        self.lock = lock
        self.namespace = _new_namespace(base)
        self._ranges = ranges

    def recycle(self) -> None:
        """Return it for the next sandbox; nothing may be left of the one that had it."""
        if self._ranges is None or self._ranges.why_none is not None:
            self.close()
        else:
            self._ranges.free.append(self)

    def close(self) -> None:
        """Release it, unless a sandbox still runs in it."""
        self.lock.close()
        os.close(self.namespace)


class UidRanges:
    """The ranges of one backend. They are reused after a sandbox ended, since creating one takes 3 ms.

    Attributes:
        why_none: Why there are no ranges, in one line; None if there are.
        free: Ranges without a sandbox.
    """

    def __init__(self) -> None:
        self.why_none: str | None = "the backend is not open"
        self.free: list[UidRange] = []

    def open(self) -> None:
        """Check whether ranges can be created. Blocks for milliseconds."""
        self.why_none = why_unavailable()

    def take(self) -> UidRange | None:
        """Return a range unused on this machine; None if ranges are not available. Blocks for milliseconds.

        Raises:
            OSError: All are in use, or the kernel refuses the namespace.
        """
        if self.why_none is not None:
            return None
        try:
            return self.free.pop()
        except IndexError:
            return _new_range(self)

    def close(self) -> None:
        """Close the free ranges now, and those in use when they are put back."""
        self.why_none = "the backend is closed"
        while self.free:
            self.free.pop().close()


def why_unavailable() -> str | None:
    """Return why sandboxes cannot have their own uids here, in one line; None if they can. Blocks for milliseconds."""
    if os.geteuid() != 0:
        return "separate uids for each sandbox need root"
    try:
        _try_once()
    except OSError as error:
        return f"no user namespace for each sandbox: {error}"
    return None


def shared() -> tuple[str, ...]:
    """Return the kernel resources that sandboxes share with each other and with host users. Blocks for milliseconds."""
    if why_unavailable() is None:
        return ()
    return SHARED_PER_UID if os.geteuid() == 0 else (*SHARED_PER_UID, "terminals")


@lru_cache(maxsize=1)
def _try_once() -> None:
    """Raise `OSError` if a sandbox cannot be started in a namespace of ours; success is cached."""
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
    """Return the descriptor of a new user namespace created by uid `base`."""
    argv = ["setpriv", f"--reuid={base}", f"--regid={base}", "--clear-groups", "unshare", "--user", "cat"]
    pipe = subprocess.PIPE
    env = {"PATH": os.environ.get("PATH", os.defpath)}
    with subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env=env) as made:
        # `cat` answers once it runs in the namespace, and exits at the end of its input.
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
