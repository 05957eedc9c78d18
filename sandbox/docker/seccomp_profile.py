"""The seccomp filter of a container, in Docker's JSON format.

The filter is an allow-list of the system calls that everyday programs need. It is at least as strict as Docker's
default filter and as the filter of bubblewrap sandboxes (`envkit.sandbox.host.seccomp`). It applies to all processes of
the sandbox, including process 1. A call that is not on the list fails with EPERM. A call that is newer than the list,
or that programs can replace by an older one, fails with ENOSYS. A call of another architecture, as in 32-bit programs,
kills its process.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envkit.types import JSON

from ..host import seccomp

_ALLOWED = """
    accept accept4 access alarm arch_prctl bind brk capget capset chdir chmod chown clock_getres clock_gettime
    clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl
    epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64
    fallocate fchdir fchmod fchmodat fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr
    fsetxattr fstat fstatfs fsync ftruncate futex futex_waitv futimesat get_robust_list getcpu getcwd getdents
    getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority
    getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr
    inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioprio_get ioprio_set kill lchown lgetxattr link
    linkat listen listxattr llistxattr lremovexattr lseek lsetxattr lstat madvise membarrier memfd_create mincore mkdir
    mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect mq_getsetattr mq_notify mq_open mq_timedreceive
    mq_timedsend mq_unlink mremap msgctl msgget msgrcv msgsnd msync munlock munlockall munmap nanosleep newfstatat open
    openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 poll ppoll prctl pread64 preadv preadv2 prlimit64
    pselect6 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg removexattr
    rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
    rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
    sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity
    sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop sendfile
    sendmmsg sendmsg sendto set_robust_list set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid
    setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid setxattr shmat shmctl shmdt
    shmget shutdown sigaltstack signalfd signalfd4 splice stat statfs statx symlink symlinkat sync sync_file_range
    syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create
    timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat utime utimensat utimes vfork
    vmsplice wait4 waitid write writev
"""
_MISSING = ("clone3", "landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self")
_PERSONALITIES = (0, 0xFFFFFFFF)
"""Allowed arguments of the call `personality`: the one that sets the default value, and the one that only queries."""
_WORD = 0xFFFFFFFF
_WORD_BITS = 32


def profile(machine: str) -> str | None:
    """Return the filter as JSON; None if `seccomp.program` does not support the machine."""
    if seccomp.program(machine) is None:
        return None
    rules = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": list(_rules(machine))}
    # runc returns ENOSYS for newer calls only if the profile names the architectures.
    return json.dumps({**rules, "architectures": [f"SCMP_ARCH_{machine.upper()}"]})


def profile_for(daemon: Mapping[str, Any]) -> str | None:
    """Return the filter for a daemon with this ``docker info``; None without seccomp or for an unknown machine."""
    if not any(option.startswith("name=seccomp") for option in daemon.get("SecurityOptions") or ()):
        return None
    return profile(str(daemon.get("Architecture")))


def _rules(machine: str) -> Iterator[JSON]:
    yield _rule(sorted(set(_ALLOWED.split()) - set(seccomp.denied(machine))))
    yield {"names": list(_MISSING), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS}
    yield _rule(["clone"], _equals(0, seccomp.NEW_NAMESPACES, 0))
    for family in seccomp.FAMILIES:
        yield _rule(["socket", "socketpair"], _equals(0, _WORD, family))
    for value in _PERSONALITIES:
        yield _rule(["personality"], _equals(0, _WORD, value))
    for bits, value in _blocks_without(seccomp.TYPES_INTO_TERMINALS):
        yield _rule(["ioctl"], _equals(1, bits, value))


def _rule(names: Sequence[str], *arguments: JSON) -> JSON:
    return {"names": list(names), "action": "SCMP_ACT_ALLOW", "args": list(arguments)}


def _equals(index: int, bits: int, value: int) -> JSON:
    """Return a condition: the bits of the argument at `index` that are set in the 32-bit mask `bits` equal `value`."""
    return {"index": index, "value": bits, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _blocks_without(values: Sequence[int], length: int = 0, start: int = 0) -> Iterator[tuple[int, int]]:
    """Split all 32-bit numbers except `values` into blocks with the same leading bits; yield (mask, bits) per block.

    The filter has a rule for each block: a rule has one condition per argument, so it cannot exclude several values.
    The recursion splits the block whose first `length` bits are those of `start`.
    """
    bits = _WORD & ~(_WORD >> length)
    if not any(value & bits == start for value in values):
        yield bits, start
    elif length < _WORD_BITS:
        for half in (0, 1):
            yield from _blocks_without(values, length + 1, start | half << (_WORD_BITS - 1 - length))
