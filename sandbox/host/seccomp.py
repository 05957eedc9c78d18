"""The seccomp filter of a sandbox's programs, as a classic BPF program.

The filter is a deny-list, because an allow-list would need updates for new programs and libraries. System calls that
affect more than the sandbox fail with EPERM: mounts, namespaces, kernel modules, kernel keys (shared by all processes
of a user), asynchronous I/O contexts (limited for the whole machine), clocks, swap, and tracing. Rarely needed calls
with many known kernel bugs also fail with EPERM: `bpf`, `io_uring`, `userfaultfd`, `perf_event_open`. Only sockets of
the families Unix, IPv4, IPv6 and netlink are allowed, because others, such as vsock, may ignore network namespaces.
`clone3`, whose flags the filter cannot read, and calls newer than this list fail with ENOSYS. Programs then use older
calls instead. A program that makes calls of another architecture, such as a 32-bit program, is killed.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_Instruction: TypeAlias = tuple[int, int, int, int]
"""A BPF instruction: opcode, instructions to skip if its condition is true, instructions to skip if not, operand."""

# Each name maps to the call's numbers on x86_64 and on aarch64; None if the architecture does not have the call.
_DENIED: dict[str, tuple[int, int | None]] = {
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "get_kernel_syms": (177, None),
    "init_module": (175, 105),
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "query_module": (178, None),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
}
_NEWEST_KNOWN = 462
"""Number of the newest call that this list considers: `mseal` of Linux 6.10, on all architectures."""
_CLONE3 = 435
_X32 = 0x40000000
"""Bit that is set in the numbers of calls that programs of the x32 ABI make on x86_64."""

# Flags of `clone`: CLONE_NEW{NS, CGROUP, UTS, IPC, USER, PID, NET}
NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
FAMILIES = (1, 2, 10, 16)
TYPES_INTO_TERMINALS = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX insert input into a terminal

_LOAD = 0x20
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_RETURN = 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
"""Offsets in the kernel's `seccomp_data`: call number, architecture, lower halves of the first and second argument."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    audit: int
    column: int
    clone: int
    socket: int
    socketpair: int
    ioctl: int


_MACHINES = {
    "x86_64": _Architecture(audit=0xC000003E, column=0, clone=56, socket=41, socketpair=53, ioctl=16),
    "aarch64": _Architecture(audit=0xC00000B7, column=1, clone=220, socket=198, socketpair=199, ioctl=29),
}


def program(machine: str | None = None) -> bytes | None:
    """Return the filter for the architecture `machine`, by default that of this machine; None if not supported."""
    found = _MACHINES.get(platform.machine() if machine is None else machine)
    if found is None:
        return None
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(found))


def denied(machine: str) -> dict[str, int]:
    """Return the names of the calls that always fail with EPERM, with their numbers on the architecture `machine`."""
    column = _MACHINES[machine].column
    return {name: number for name, both in _DENIED.items() if (number := both[column]) is not None}


def _instructions(machine: _Architecture) -> Iterator[_Instruction]:
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _IF_EQUAL, 1, 0, machine.audit
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    if machine.column == 0:
        yield from _if(_IF_AT_LEAST, (_X32,), errno.ENOSYS)
    yield from _if(_IF_AT_LEAST, (_NEWEST_KNOWN + 1,), errno.ENOSYS)
    yield from _if(_IF_EQUAL, (_CLONE3,), errno.ENOSYS)
    numbers = sorted(number for both in _DENIED.values() if (number := both[machine.column]) is not None)
    yield from _if(_IF_EQUAL, numbers, errno.EPERM)
    yield from _with_argument(machine.clone, _FIRST, list(_if(_IF_ANY_BIT, (NEW_NAMESPACES,), errno.EPERM)))
    yield from _with_argument(machine.ioctl, _SECOND, list(_if(_IF_EQUAL, TYPES_INTO_TERMINALS, errno.EPERM)))
    for call in (machine.socket, machine.socketpair):
        allowed = [(_IF_EQUAL, len(FAMILIES) - index, 0, family) for index, family in enumerate(FAMILIES)]
        yield from _with_argument(call, _FIRST, [*allowed, (_RETURN, 0, 0, _ERROR | errno.EAFNOSUPPORT)])
    yield _RETURN, 0, 0, _ALLOW


def _if(comparison: int, operands: Sequence[int], number: int) -> Iterator[_Instruction]:
    """Yield instructions that make the call fail with error `number` if `comparison` is true for one of `operands`."""
    for index, operand in enumerate(operands):
        last = index == len(operands) - 1
        yield comparison, len(operands) - 1 - index, 1 if last else 0, operand
    yield _RETURN, 0, 0, _ERROR | number


def _with_argument(call: int, argument: int, checks: Sequence[_Instruction]) -> Iterator[_Instruction]:
    """Yield instructions for `call` that apply `checks` to its argument at offset `argument`, and then allow it."""
    yield _IF_EQUAL, 0, len(checks) + 2, call
    yield _LOAD, 0, 0, argument
    yield from checks
    yield _RETURN, 0, 0, _ALLOW
