"""What the filter of system calls says to each call, worked out by an interpreter of our own."""

from __future__ import annotations

import errno

import pytest

from envkit.sandbox.host import seccomp
from tests.sandbox import bpf

MACHINES = ("x86_64", "aarch64")
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198}
IOCTL = {"x86_64": 16, "aarch64": 29}

ALLOWED = 0x7FFF0000
KILLED = 0x80000000
NEW_USER = 0x10000000


def refused(number: int) -> int:
    return 0x00050000 | number


def verdict(machine: str, number: int, *arguments: int) -> int:
    program = seccomp.program(machine)
    assert program is not None
    return bpf.verdict(program, number, *arguments, audit=bpf.AUDIT[machine])


@pytest.mark.parametrize("machine", MACHINES)
def test_exactly_the_listed_calls_are_refused_and_unknown_ones_do_not_exist(machine: str) -> None:
    listed = set(seccomp.denied(machine).values())
    needs_look = {SOCKET[machine], SOCKET[machine] + (12 if machine == "x86_64" else 1)}
    for number in range(700):
        if number in needs_look:
            continue
        if number in listed:
            expected = refused(errno.EPERM)
        elif number == 435 or number > 462:
            expected = refused(errno.ENOSYS)
        else:
            expected = ALLOWED
        assert verdict(machine, number) == expected, number


@pytest.mark.parametrize(
    ("name", "on_x86_64", "on_aarch64"),
    [
        ("mount", 165, 40),
        ("ptrace", 101, 117),
        ("io_setup", 206, 0),
    ],
)
def test_calls_have_the_numbers_of_their_machine(name: str, on_x86_64: int, on_aarch64: int) -> None:
    assert (seccomp.denied("x86_64")[name], seccomp.denied("aarch64")[name]) == (on_x86_64, on_aarch64)


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_is_typed_into_a_terminal(machine: str) -> None:
    tcgets, tiocsti = 0x5401, 0x5412
    assert verdict(machine, IOCTL[machine], 1, tcgets) == ALLOWED
    assert verdict(machine, IOCTL[machine], 1, tiocsti) == refused(errno.EPERM)


def test_the_upper_half_of_an_argument_does_not_hide_the_lower() -> None:
    assert verdict("x86_64", CLONE["x86_64"], 1 << 32 | NEW_USER) == refused(errno.EPERM)
    assert verdict("x86_64", SOCKET["x86_64"], 1 << 32 | 40) == refused(errno.EAFNOSUPPORT)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_call_of_another_architecture_kills(machine: str) -> None:
    program = seccomp.program(machine)
    assert program is not None
    i386 = 0x40000003
    assert bpf.verdict(program, 20, audit=i386) == KILLED


def test_for_an_unknown_machine_there_is_no_filter() -> None:
    assert seccomp.program("vax") is None
