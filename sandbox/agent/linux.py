"""Functions for Linux system calls and files: parent-death signals, privileges, OOM scores, cgroups and limits."""

from __future__ import annotations

import fcntl
import os
import resource
import struct
import sys
from _socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from ctypes import CDLL
    from typing import TypeVar

    T = TypeVar("T")

_FIONREAD = 0x541B
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
"""Beginnings of the paths of the files with the limit and the number of pids, for cgroup v2 and cgroup v1."""
_AGENT_GROUP = "/sys/fs/cgroup/memory/agent/tasks"
"""Path of the tasks file of the agent user's memory cgroup (v1), as process 1 of a container sees it."""
_SCORE = "/proc/self/oom_score_adj"
_FIRST_TO_DIE = b"1000"
_PENDING_SIGNALS = 4096
_QUEUE_BYTES = 400 << 10


class User:
    """A user that programs run as.

    Attributes:
        uid: User and group id; None for the user that the agent process itself runs as.
        env: Environment variables of the user's programs, in addition to the sandbox's.
        is_private: Whether other users have no access to the user's files; ignored if `uid` is None.
        preemptible: Whether the user's programs may be killed so that processes of other users can start.
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
        """The mode bits that new files of this user may have. All other bits are cleared."""
        return 0o700 if self.is_private else 0o777

    def act(self, action: Callable[[], T]) -> T:
        """Call `action` with this user's file access rights and return its result."""
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
        """Return read and write end of a new pipe. The user's programs can reopen the write end as ``/dev/stderr``."""
        reader, writer = os.pipe()
        if self.uid is not None:
            os.fchown(writer, self.uid, self.uid)
        return reader, writer

    def become(self, hidden: bool = False) -> None:
        """Switch this process to the user permanently and drop all capabilities.

        If `uid` is None, this only sets NO_NEW_PRIVS.

        Args:
            hidden: Whether to prevent the user's programs from sending signals to this process.
        """
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if self.uid is None:
            return
        if self.is_private:
            os.umask(0o077)
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        for capability in range(_CAPABILITIES):
            # This fails without CAP_SETPCAP. Ignore the failure, because the steps below still drop the capabilities.
            _prctl(_PR_CAPBSET_DROP, capability)
        os.setgroups([])
        os.setresgid(self.uid, self.uid, self.uid)
        # A process can send us signals only if its uid equals our real or saved uid.
        known = _HIDDEN_UID if hidden else self.uid
        os.setresuid(known, self.uid, known)
        _library().capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))


def lent_files() -> dict[str, int]:
    """Receive open files from the host over the socket whose descriptor is our first command-line argument.

    Returns the descriptors by name: ``s`` (the file of our OOM score) and ``g`` (the tasks file of the agent user's
    memory cgroup). A file that the host does not send is missing from the dict.
    """
    if len(sys.argv) < 2:
        return {}
    line = socket(fileno=int(sys.argv[1]))
    names, attached, _, _ = line.recvmsg(8, CMSG_SPACE(8), MSG_CMSG_CLOEXEC)
    line.close()
    content = attached[0][2] if attached else b""
    return dict(zip(names.decode(), struct.unpack("%di" % (len(content) // 4), content)))


def adopt_orphans() -> None:
    """Let orphaned descendants become children of this process (PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Prevent other processes with the same uid as this process from tracing and limiting it, and reading its memory.

    Only root can protect its resource limits.
    """
    _prctl(_PR_SET_DUMPABLE, 0)
    if os.geteuid() == 0:
        # Programs of root could set our resource limits if all our user and group ids equalled theirs.
        try:
            os.setresgid(0, 0, _HIDDEN_UID)
        except OSError:  # a user namespace without this id
            pass


def die_with_parent(number: int) -> None:
    """Let the kernel send signal `number` to this process when its parent dies (PR_SET_PDEATHSIG).

    Must be called after any change of the user id, because such a change clears the setting.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


class FirstToDie:
    """Forks the agent user's processes: the kernel kills them first when memory runs out, and limits their memory.

    Args:
        lent: Descriptors from `lent_files`. Files that the host did not send are opened instead, if possible.
    """

    def __init__(self, lent: dict[str, int]) -> None:
        # This process's OOM score, which forked children inherit
        self._score = lent.get("s") or _opened(_SCORE, os.O_RDWR)
        # Outside process 1 of a sandbox, the path `_AGENT_GROUP` would belong to the host's cgroups.
        self._group = lent.get("g") or (_opened(_AGENT_GROUP, os.O_WRONLY) if os.getpid() == 1 else None)

    def fork(self) -> int:
        """Fork a child that the kernel kills before this process. Returns and raises the same as `os.fork`."""
        if self._score is None:
            return os.fork()
        before = os.pread(self._score, 16, 0)
        os.pwrite(self._score, _FIRST_TO_DIE, 0)
        pid = None
        try:
            pid = os.fork()
            return pid
        finally:
            if pid != 0:  # The child must not write, because the descriptor is the score file of the parent.
                os.pwrite(self._score, before, 0)

    def join_group(self) -> None:
        """Move this process, which must be single-threaded, into the memory cgroup of the agent user's programs."""
        if self._group is not None:
            os.write(self._group, b"0")


def limit_resources() -> None:
    """Disable core files, and limit pending signals and message queues.

    A new limit is at most half of the old hard limit, because the agent process and graders need the other half.
    """
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS),
        (resource.RLIMIT_MSGQUEUE, _QUEUE_BYTES),
    ):
        hard = resource.getrlimit(kind)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard // 2)
        resource.setrlimit(kind, (bound, bound))


def waiting_bytes(fd: int) -> int:
    """Return the number of bytes that can be read from a pipe, socket or terminal without blocking."""
    return int(struct.unpack("i", fcntl.ioctl(fd, _FIONREAD, bytes(4)))[0])


def close_others(*kept: int) -> None:
    """Close all file descriptors except 0, 1, 2 and `kept`."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in kept:
            try:
                os.close(fd)
            except OSError:  # `listdir` listed its own descriptor, which is closed by now.
                pass


def processes(name: str) -> int | None:
    """Return the sandbox's number (``.current``) or limit (``.max``) of processes and threads; None if unknown."""
    for beginning in _BOUNDS:
        fd = _opened(beginning + name, os.O_RDONLY)
        if fd is None:
            continue
        try:
            content = os.read(fd, 64).strip()
        finally:
            os.close(fd)
        return int(content) if content.isdigit() else None
    return None


def _opened(path: str, flags: int) -> int | None:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError:
        return None


def _prctl(option: int, value: int) -> None:
    from ctypes import c_ulong

    zero = c_ulong(0)
    _library().prctl(option, c_ulong(value), zero, zero, zero)


def _library() -> CDLL:
    """Return the C library. Imports ctypes late, because that would take a fifth of the time until the first reply."""
    from ctypes import CDLL

    return CDLL(None)
