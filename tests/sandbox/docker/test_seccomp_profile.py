"""What the filter of a container says to each call: as it is written, and as the kernel has it, beside Docker's own."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from envkit.sandbox.docker import seccomp_profile
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.host import seccomp
from envkit.types import SandboxSpec
from tests.contract.kinds import run
from tests.sandbox.bpf import AUDIT, verdict
from tests.sandbox.containers import containers_of, docker, image

MACHINES = ("x86_64", "aarch64")
ALLOWED = 0x7FFF0000
KILLED = (0, 0x80000000)  # the thread or the process
OTHER_ARCHITECTURES = (0x40000003, 0x40000028)  # i386, arm
# Of clone, socket, socketpair, ioctl.
NUMBERS = {"x86_64": (56, 41, 53, 16), "aarch64": (220, 198, 199, 29)}
_ATTACH, _DETACH, _GET_FILTER = 16, 17, 0x420C
_WAIT_FOR_ALL = 0x40000000


@cache
def rules(machine: str = "x86_64") -> list[dict[str, object]]:
    written = seccomp_profile.profile(machine)
    assert written is not None
    found = json.loads(written)
    assert found["defaultAction"] == "SCMP_ACT_ERRNO"
    assert found["architectures"] == [f"SCMP_ARCH_{machine.upper()}"]
    return list(found["syscalls"])


def allows(name: str, *arguments: int) -> bool:
    """Whether one of the written rules allows a call."""
    for rule in rules():
        conditions = rule.get("args", [])
        assert isinstance(conditions, list)
        assert isinstance(rule["names"], list)
        if rule["action"] == "SCMP_ACT_ALLOW" and name in rule["names"]:
            assert len({condition["index"] for condition in conditions}) == len(conditions)
            if all(arguments[one["index"]] & one["value"] == one["valueTwo"] for one in conditions):
                return True
    return False


@pytest.mark.parametrize("machine", MACHINES)
def test_what_bubblewrap_sandboxes_refuse_is_never_allowed(machine: str) -> None:
    named = {name for rule in rules(machine) if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}  # type: ignore[attr-defined]
    assert named & set(seccomp.denied(machine)) == set()
    assert named & {"clone3", "io_setup", "memfd_secret", "modify_ldt", "name_to_handle_at"} == set()
    assert {"execve", "futex", "openat", "mmap", "getrandom", "statx", "sendmsg"} <= named


def test_every_request_to_a_device_is_allowed_but_typing_into_terminals() -> None:
    tiocsti, tioclinux = 0x5412, 0x541C
    numbers = [*range(0x5400, 0x5480), *(random.Random(7).randrange(1 << 32) for _ in range(300)), 0, 0xFFFFFFFF]
    for number in numbers:
        for upper_half in (0, 1 << 32, 0xFFFFFFFF << 32):
            assert allows("ioctl", 0, upper_half | number) == (number not in (tiocsti, tioclinux)), hex(number)


@contextmanager
def plain_container() -> Iterator[int]:
    """A container as Docker makes it without being asked for more; gives its process."""
    container = docker("run", "--detach", "--network", "none", "--cap-drop", "ALL", image(), "sleep", "60")
    try:
        yield process_of(container)
    finally:
        docker("rm", "--force", "--volumes", container)


def process_of(container: str) -> int:
    return int(docker("inspect", "--format", "{{.State.Pid}}", container))


def filters_of(pid: int) -> list[bytes]:
    """Return the programs that the kernel runs before each call of a process."""
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    trace.restype = ctypes.c_long
    if trace(_ATTACH, pid, None, None) == -1:
        pytest.skip("other processes cannot be traced here")
    try:
        os.waitpid(pid, _WAIT_FOR_ALL)
        found: list[bytes] = []
        while (length := trace(_GET_FILTER, pid, len(found), None)) > 0:
            content = ctypes.create_string_buffer(8 * length)
            trace(_GET_FILTER, pid, len(found), content)
            found.append(content.raw)
        if not found and ctypes.get_errno() in (errno.EINVAL, errno.EIO, errno.EACCES):
            pytest.skip("this kernel does not show filters")
        return found
    finally:
        trace(_DETACH, pid, None, None)


def cases() -> Iterator[tuple[int, ...]]:
    """Every call, and those whose arguments matter with many of these."""
    clone, socket, socketpair, ioctl = NUMBERS[platform.machine()]
    for number in range(600):
        yield (number,)
        yield (number | 0x40000000,)
    for upper_half in (0, 1 << 32):
        for family in range(64):
            yield socket, upper_half | family
            yield socketpair, upper_half | family
        for request in range(0x5400, 0x5480):
            yield ioctl, 0, upper_half | request
        for bit in range(32):
            for kind in (0x11, 0x1200011, 0x3D0F00):
                yield clone, upper_half | kind | 1 << bit


@pytest.mark.docker
@pytest.mark.skipif(platform.machine() not in MACHINES or os.geteuid() != 0, reason="filters are shown to root")
def test_what_the_kernel_lets_a_sandbox_do_it_lets_plain_containers_and_bubblewrap_sandboxes_do() -> None:
    ours = seccomp.program()
    audit = AUDIT[platform.machine()]
    assert ours is not None
    found = []

    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await backend.start(SandboxSpec(image=image(), profile="system"))
            found.extend(filters_of(process_of(*containers_of(sandbox.id))))

    run(main)
    (of_the_sandbox,) = found
    with plain_container() as pid:
        (of_docker,) = filters_of(pid)
    allowed = [case for case in cases() if verdict(of_the_sandbox, *case, audit=audit) == ALLOWED]
    assert len(allowed) > 300
    for other in OTHER_ARCHITECTURES:
        assert {verdict(of_the_sandbox, number, audit=other) for number in range(500)} <= set(KILLED)
    assert [case for case in allowed if verdict(of_docker, *case, audit=audit) != ALLOWED] == []
    assert [case for case in allowed if verdict(ours, *case, audit=audit) != ALLOWED] == []
