"""What the kernel is asked for directly: bonds between processes, privileges, and how much lies in a pipe."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from _socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, socket

try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from ctypes import CDLL
    from typing import TypeVar

    T = TypeVar("T")

_LINUX = sys.platform.startswith("linux")
_FIONREAD = 0x541B if _LINUX else 0x4004667F
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION = 0x20080522
_CAPABILITIES = 64
_HIDDEN_UID = 1002
"""A user that nobody in a box is."""
_BOUNDS = ("/sys/fs/cgroup/pids", "/sys/fs/cgroup/pids/pids")
"""How the names of the files begin that say how many processes there may be and are: of version 2, of version 1."""
_AGENT_GROUP = "/sys/fs/cgroup/memory/agent/tasks"
"""Of version 1, as process 1 of a container sees it."""
_SCORE = "/proc/self/oom_score_adj"
_FIRST_TO_DIE = b"1000"
_PENDING_SIGNALS = 4096
_QUEUE_BYTES = 400 << 10


class User:
    """Who runs something.

    Attributes:
        uid: User and group id to take; None stays what the agent is.
        env: Variables that its programs have beside those of the box.
        is_private: Whether what it leaves is closed to the others; has no meaning for one that is no other.
        preemptible: Whether its programs are ended when another user finds no room for a process.
    """

    def __init__(
        self,
        uid: int | None,
        env: dict[bytes, bytes] | None = None,
        *,
        is_private: bool = False,
        preemptible: bool = False,
    ) -> None:
        self.uid = uid
        self.env = env or {}
        self.is_private = is_private
        self.preemptible = preemptible

    @property
    def rights(self) -> int:
        """What of a mode its new files have, unless somebody says otherwise."""
        return 0o700 if self.is_private else 0o777

    def act(self, action: Callable[[], T]) -> T:
        """Return what `action` returns when done with this user's rights, so that links resolve with those."""
        if self.uid is None:
            return action()
        os.setegid(self.uid)
        try:
            os.seteuid(self.uid)
            try:
                return action()
            finally:
                os.seteuid(0)
        finally:
            os.setegid(0)

    def pipe(self) -> tuple[int, int]:
        """Make a pipe that this user can open again by its name, as programs do with ``/dev/stderr``."""
        reader, writer = os.pipe()
        if self.uid is not None:
            os.fchown(writer, self.uid, self.uid)
        return reader, writer

    def become(self, hidden: bool = False) -> None:
        """Take this user's rights for good, without capabilities; whoever stays the agent's user keeps its own.

        Args:
            hidden: Whether the user's own programs may not signal us, though files see no difference.
        """
        libc = _library()
        _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
        if self.uid is None:
            return
        if self.is_private:
            os.umask(0o077)
        _prctl(libc, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        for capability in range(_CAPABILITIES):
            _prctl(libc, _PR_CAPBSET_DROP, capability)  # refused without SETPCAP, and then the others must do
        os.setgroups([])
        os.setresgid(self.uid, self.uid, self.uid)
        known = _HIDDEN_UID if hidden else self.uid  # who sends a signal must be that user, and not only act as it
        os.setresuid(known, self.uid, known)
        if libc is not None:
            libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))


def lent_files() -> dict[str, int]:
    """Return the open files that the host sends over the socket whose number is our first argument, by their letters:
    ``s`` for our OOM score, ``g`` for what moves its writer into the agent's memory cgroup.
    """
    if len(sys.argv) < 2:
        return {}
    line = socket(fileno=int(sys.argv[1]))
    names, attached, _, _ = line.recvmsg(8, CMSG_SPACE(8), MSG_CMSG_CLOEXEC)
    line.close()
    content = attached[0][2] if attached else b""
    return dict(zip(names.decode(), struct.unpack("%di" % (len(content) // 4), content)))


class JoinedCgroup:
    """The memory cgroup of the agent's programs, whose limit leaves a reserve to us and to graders.

    Args:
        lent: The file that moves its writer, open for writing, where the cgroup file system is read-only.
    """

    def __init__(self, lent: int | None) -> None:
        self._fd = lent
        self._is_known = lent is not None

    def find(self) -> None:
        """Open the file where the host has made it writable, once; before the first `join`."""
        if not self._is_known and os.getpid() == 1:  # else the group is the host's
            self._is_known = True
            try:
                self._fd = os.open(_AGENT_GROUP, os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                pass

    def join(self) -> None:
        """Move this process, which has one thread. Raises `OSError` when the kernel refuses."""
        if self._fd is not None:
            os.write(self._fd, b"0")


def adopt_orphans() -> bool:
    """Become the parent of every orphan below this process; say whether that worked."""
    return _prctl(_library(), _PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Keep others that have our rights, as programs of the box's root, from tracing us and from reading our memory."""
    if not _prctl(_library(), _PR_SET_DUMPABLE, 0) and _LINUX and os.geteuid() == 0:
        os.setegid(_HIDDEN_UID)  # whoever changes its rights is hidden as well
        os.setegid(0)


def die_with_parent(number: int) -> None:
    """Be sent signal `number` when the parent dies. Forgotten when the user changes."""
    _prctl(_library(), _PR_SET_PDEATHSIG, number)


class Score:
    """This process's ``oom_score_adj``: the higher, the sooner the kernel ends it. Children inherit it at the fork.

    Args:
        lent: The file, open for writing, where /proc is read-only.
    """

    def __init__(self, lent: int | None) -> None:
        self._lent = lent

    def fork_first_to_die(self) -> int:
        """Fork; the child is ended before us where we may change our score. Raises as `os.fork`."""
        try:
            fd = os.open(_SCORE, os.O_RDWR | os.O_CLOEXEC) if self._lent is None else os.dup(self._lent)
        except OSError:
            return os.fork()
        try:
            before = os.pread(fd, 16, 0)
            os.pwrite(fd, _FIRST_TO_DIE, 0)
            pid = None
            try:
                pid = os.fork()
                return pid
            finally:
                if pid != 0:  # the child would write to our file, perhaps while we fork again
                    os.pwrite(fd, before, 0)
        finally:
            os.close(fd)


def limit_resources() -> None:
    """Forbid core files, and bound signals and message queues to half of the hard limit, to leave some to graders."""
    if resource is not None:
        bounds = [(resource.RLIMIT_CORE, 0)]
        if _LINUX:
            bounds += [(resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS), (resource.RLIMIT_MSGQUEUE, _QUEUE_BYTES)]
        for kind, most in bounds:
            hard = resource.getrlimit(kind)[1]
            bound = most if hard == resource.RLIM_INFINITY else min(most, hard // 2)
            resource.setrlimit(kind, (bound, bound))


def be_killed_first() -> None:
    """Raise our OOM score above the agent's, in case the agent could not do so when it forked us."""
    is_seen = os.geteuid() != 0 and _prctl(_library(), _PR_SET_DUMPABLE, 1)  # of who is hidden, this file is root's
    try:
        fd = os.open(_SCORE, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, _FIRST_TO_DIE)
        finally:
            os.close(fd)
    except OSError:
        pass
    if is_seen:
        hide_memory()


def waiting_bytes(fd: int) -> int:
    """Return how much can be read from a pipe, socket or terminal without waiting."""
    return int(struct.unpack("i", fcntl.ioctl(fd, _FIONREAD, bytes(4)))[0])


def process_bound() -> int | None:
    """Return how many processes and threads the box may have; None where there is no bound, or we are not process 1."""
    return _processes(".max") if os.getpid() == 1 else None


def process_count() -> int | None:
    """Return how many processes and threads the box has, also dead ones; None where this is not known."""
    return _processes(".current")


def close_others(*kept: int) -> None:
    """Close every file but standard input, output, error and `kept`."""
    folder = "/proc/self/fd" if _LINUX else "/dev/fd"
    for name in os.listdir(folder):
        fd = int(name)
        if fd > 2 and fd not in kept:
            try:
                os.close(fd)
            except OSError:  # the one that listed them
                pass


def _processes(name: str) -> int | None:
    for beginning in _BOUNDS:
        try:
            fd = os.open(beginning + name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            content = os.read(fd, 64).strip()
        finally:
            os.close(fd)
        return int(content) if content.isdigit() else None
    return None


def _prctl(libc: CDLL | None, option: int, value: int) -> bool:
    if libc is None:
        return False
    from ctypes import c_ulong

    zero = c_ulong(0)
    return bool(libc.prctl(option, c_ulong(value), zero, zero, zero) == 0)


def _library() -> CDLL | None:
    """Return the C library; None in a reduced Python, whose container has what is asked for here by its own settings.

    Loaded when it is first needed: that costs a fifth of a box's start, and the first answer does not wait for it.
    """
    if not _LINUX:
        return None
    try:
        from ctypes import CDLL

        return CDLL(None)
    except (ImportError, OSError):
        return None
