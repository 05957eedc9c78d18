"""Linux system calls and files: parent-death signals, privileges, OOM scores, cgroups and pipe sizes."""

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
"""A user id that no user of a sandbox has."""
_BOUNDS = ("/sys/fs/cgroup/pids", "/sys/fs/cgroup/pids/pids")
"""Prefixes of the pids limit and count files: cgroup v2, cgroup v1."""
_AGENT_GROUP = "/sys/fs/cgroup/memory/agent/tasks"
"""For cgroup v1, as seen by process 1 of a container."""
_SCORE = "/proc/self/oom_score_adj"
_FIRST_TO_DIE = b"1000"
_PENDING_SIGNALS = 4096
_QUEUE_BYTES = 400 << 10


class User:
    """A user that programs run as.

    Attributes:
        uid: User and group id; None keeps the agent's.
        env: Environment variables of its programs, in addition to the sandbox's.
        is_private: Whether its files are closed to other users; ignored if `uid` is None.
        preemptible: Whether its programs are killed when another user's process cannot start.
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
        """Mask for the default mode of its new files."""
        return 0o700 if self.is_private else 0o777

    def act(self, action: Callable[[], T]) -> T:
        """Run `action` with this user's rights, so that links resolve with them; return its result."""
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
        """Return a pipe that this user can reopen by name, as programs do with ``/dev/stderr``."""
        reader, writer = os.pipe()
        if self.uid is not None:
            os.fchown(writer, self.uid, self.uid)
        return reader, writer

    def become(self, hidden: bool = False) -> None:
        """Switch to this user irrevocably, without capabilities; does nothing more than NO_NEW_PRIVS if `uid` is None.

        Args:
            hidden: Whether the user's own programs cannot signal this process; file access does not change.
        """
        libc = _library()
        _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
        if self.uid is None:
            return
        if self.is_private:
            os.umask(0o077)
        _prctl(libc, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        for capability in range(_CAPABILITIES):
            _prctl(libc, _PR_CAPBSET_DROP, capability)  # refused without CAP_SETPCAP; the other measures remain
        os.setgroups([])
        os.setresgid(self.uid, self.uid, self.uid)
        known = _HIDDEN_UID if hidden else self.uid  # signals need a matching real uid
        os.setresuid(known, self.uid, known)
        if libc is not None:
            libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))


def lent_files() -> dict[str, int]:
    """Return the open files that the host sends over the socket whose number is our first argument, by letter:
    ``s`` for our OOM score, ``g`` for the tasks file of the agent's memory cgroup.
    """
    if len(sys.argv) < 2:
        return {}
    line = socket(fileno=int(sys.argv[1]))
    names, attached, _, _ = line.recvmsg(8, CMSG_SPACE(8), MSG_CMSG_CLOEXEC)
    line.close()
    content = attached[0][2] if attached else b""
    return dict(zip(names.decode(), struct.unpack("%di" % (len(content) // 4), content)))


class JoinedCgroup:
    """The memory cgroup of the agent user's programs; its limit leaves a reserve for the agent and graders.

    Args:
        lent: The tasks file, open for writing, if the cgroup file system is read-only.
    """

    def __init__(self, lent: int | None) -> None:
        self._fd = lent
        self._is_known = lent is not None

    def find(self) -> None:
        """Open the tasks file if the host made it writable; call before the first `join`."""
        if not self._is_known and os.getpid() == 1:  # otherwise the group belongs to the host
            self._is_known = True
            try:
                self._fd = os.open(_AGENT_GROUP, os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                pass

    def join(self) -> None:
        """Move this single-threaded process. Raises `OSError` if the kernel refuses."""
        if self._fd is not None:
            os.write(self._fd, b"0")


def adopt_orphans() -> bool:
    """Become the parent of orphaned descendants (PR_SET_CHILD_SUBREAPER); return whether that worked."""
    return _prctl(_library(), _PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Keep processes with our rights, such as root's programs, from tracing us and reading our memory."""
    if not _prctl(_library(), _PR_SET_DUMPABLE, 0) and _LINUX and os.geteuid() == 0:
        os.setegid(_HIDDEN_UID)  # a change of ids makes a process undumpable, too
        os.setegid(0)


def die_with_parent(number: int) -> None:
    """Receive signal `number` when the parent dies (PR_SET_PDEATHSIG). A change of user clears it."""
    _prctl(_library(), _PR_SET_PDEATHSIG, number)


class Score:
    """This process's ``oom_score_adj``: the kernel kills higher scores first. Children inherit it at the fork.

    Args:
        lent: The file, open for writing, if /proc is read-only.
    """

    def __init__(self, lent: int | None) -> None:
        self._lent = lent

    def fork_first_to_die(self) -> int:
        """Fork a child that the kernel kills before us, if we may change our score. Raises as `os.fork`."""
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
                if pid != 0:  # in the child, this would write to the parent's file
                    os.pwrite(fd, before, 0)
        finally:
            os.close(fd)


def limit_resources() -> None:
    """Disable core files; limit signals and message queues to half the hard limit, to leave some for graders."""
    if resource is not None:
        bounds = [(resource.RLIMIT_CORE, 0)]
        if _LINUX:
            bounds += [(resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS), (resource.RLIMIT_MSGQUEUE, _QUEUE_BYTES)]
        for kind, most in bounds:
            hard = resource.getrlimit(kind)[1]
            bound = most if hard == resource.RLIM_INFINITY else min(most, hard // 2)
            resource.setrlimit(kind, (bound, bound))


def be_killed_first() -> None:
    """Raise our OOM score above the agent's, if the agent could not do so before the fork."""
    is_seen = os.geteuid() != 0 and _prctl(
        _library(), _PR_SET_DUMPABLE, 1
    )  # root owns this file of an undumpable process
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
    """Return the number of bytes that can be read from a pipe, socket or terminal without blocking."""
    return int(struct.unpack("i", fcntl.ioctl(fd, _FIONREAD, bytes(4)))[0])


def process_bound() -> int | None:
    """Return the sandbox's limit of processes and threads; None if there is no limit, or we are not process 1."""
    return _processes(".max") if os.getpid() == 1 else None


def process_count() -> int | None:
    """Return the number of processes and threads, including zombies; None if it is unknown."""
    return _processes(".current")


def close_others(*kept: int) -> None:
    """Close every file but standard input, output, error and `kept`."""
    folder = "/proc/self/fd" if _LINUX else "/dev/fd"
    for name in os.listdir(folder):
        fd = int(name)
        if fd > 2 and fd not in kept:
            try:
                os.close(fd)
            except OSError:  # the descriptor of the listing itself
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
    """Return the C library; None in a reduced Python, where the container's own settings apply instead.

    Loaded on demand: it costs a fifth of a sandbox's start, and the first reply need not wait for it.
    """
    if not _LINUX:
        return None
    try:
        from ctypes import CDLL

        return CDLL(None)
    except (ImportError, OSError):
        return None
