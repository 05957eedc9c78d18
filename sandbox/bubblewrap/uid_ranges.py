"""Host uids of its own for each sandbox of bubblewrap, by a user namespace that root makes beforehand.

The kernel counts much of what it bounds (inotify instances, queued signals and timers, memory of pipes and of message
queues) for a user, and also for the user who made that user's namespace. Each namespace here is made by a uid of its
own range, so no sandbox takes anything from another one, nor from a real account.

Inside, uid 0 is the host's root, which lets bubblewrap mount what only root can reach; it has no capability outside the
namespace. Uids 1 to 4094 and 65534 (nobody) are those of the range; further ones do not exist.

Ranges lie between 2,000,683,008 and 2,147,352,575, which systemd, sssd and ``/etc/subuid`` leave alone by default. A
process owns a range while it holds its abstract Unix socket. The first process of a sandbox inherits that socket, so
the kernel frees the range when the sandbox and its starter are gone, however they ended.
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

from ..host.layout import COUNTED
from . import arguments

FIRST = 2_000_683_008
SIZE = 4096
COUNT = 35_808
_NOBODY = 65_534


class UidRange:
    """A range of host uids and the user namespace that has them.

    Args:
        base: Its first uid, which makes the namespace and is not used in it.
        lock: The socket that keeps others from it; closed by `close`.
        ranges: Where it is kept after use; None closes it then.

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

    def put_back(self) -> None:
        """Keep it for the next sandbox, once nothing is left of the one that had it."""
        if self._ranges is None or self._ranges.why_none is not None:
            self.close()
        else:
            self._ranges.free.append(self)

    def close(self) -> None:
        """Give it back, unless a sandbox still runs in it."""
        self.lock.close()
        os.close(self.namespace)


class UidRanges:
    """The ranges of one backend. Those of sandboxes that have ended are used again, since making one takes 3 ms.

    Attributes:
        why_none: Why there are none, in one line; None where there are.
        free: Those that no sandbox has.
    """

    def __init__(self) -> None:
        self.why_none: str | None = "the backend is not open"
        self.free: list[UidRange] = []

    def open(self) -> None:
        """Find out whether there are any. Blocks for milliseconds."""
        self.why_none = why_unavailable()

    def take(self) -> UidRange | None:
        """Return a range that no running sandbox of this machine has; None where there are none. Blocks for ms.

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
        """Give all ranges back that are not in use, and those in use when they are put back."""
        self.why_none = "the backend is closed"
        while self.free:
            self.free.pop().close()


def why_unavailable() -> str | None:
    """Return why sandboxes cannot have uids of their own here, in one line; None when they can. Blocks for ms."""
    if os.geteuid() != 0:
        return "only root can give each sandbox uids of its own"
    try:
        _try_once()
    except OSError as error:
        return f"no user namespace for each sandbox: {error}"
    return None


def shared() -> tuple[str, ...]:
    """Return which kernel resources local sandboxes share, with each other and their host users. Blocks for ms."""
    if why_unavailable() is None:
        return ()
    return COUNTED if os.geteuid() == 0 else (*COUNTED, "terminals")


@lru_cache(maxsize=1)
def _try_once() -> None:
    """Raise `OSError` if a sandbox cannot be made in a namespace of ours; a success is remembered."""
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
    raise OSError(errno.EUSERS, f"all {COUNT} ranges of uids for sandboxes are in use")


def _new_namespace(base: int) -> int:
    """Return the descriptor of a new user namespace whose maker is uid `base`."""
    argv = ["setpriv", f"--reuid={base}", f"--regid={base}", "--clear-groups", "unshare", "--user", "cat"]
    pipe = subprocess.PIPE
    env = {"PATH": os.environ.get("PATH", os.defpath)}
    with subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env=env) as made:
        # Cat answers once it runs in the namespace, and ends when its input does.
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
            raise OSError(made.stderr.read().decode(errors="replace").strip() or "unshare has ended")
        for name in ("uid_map", "gid_map"):
            entries = f"0 0 1\n1 {base + 1} {SIZE - 2}\n{_NOBODY} {base + SIZE - 1} 1\n"
            Path(f"/proc/{made.pid}/{name}").write_text(entries)
        return os.open(f"/proc/{made.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
