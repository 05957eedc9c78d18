"""What the root of a Docker sandbox tries, of which it may be more than elsewhere, and that it fails.

What hostile programs try in every kind of sandbox is in ``tests/contract/limits/test_hardening.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.docker.backend import DockerBackend
from envkit.types import SandboxSpec, SandboxUser
from tests.contract.kinds import KINDS, run
from tests.contract.shared import AnySandbox, SharedSandboxes
from tests.sandbox.containers import image

pytestmark = pytest.mark.docker

ANYBODY: tuple[SandboxUser, ...] = ("agent", "grader", "root")

TRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
    if pid != os.getpid():
        if libc.ptrace(16, pid, 0, 0) == 0:
            print("traced", pid)
        else:
            print(os.strerror(ctypes.get_errno()))
"""

READ = """
import os
for name in ("mem", "environ", "maps"):
    try:
        with open("/proc/1/" + name, "rb") as file:
            if name != "mem":
                file.read(1)
        print("opened", name)
    except OSError as error:
        print(error.strerror)
try:
    print("saw", os.readlink("/proc/1/fd/0"))
except OSError as error:
    print(error.strerror)
"""


async def require_closed(sandbox: AnySandbox) -> None:
    reported = (await sandbox.exec(["python3", "-c", READ], timeout_s=20, user="root")).stdout.splitlines()
    assert reported == ["Permission denied"] * 4


@pytest.mark.parametrize("user", ANYBODY)
def test_what_starts_programs_is_not_traced_not_even_by_the_sandbox_s_root(
    sandboxes: SharedSandboxes, user: SandboxUser
) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sandbox.shell(user="root").run("true", timeout_s=20)
        reported = (await sandbox.exec(["python3", "-c", TRACE], timeout_s=20, user=user)).stdout.splitlines()
        # Bash is a program like any other, and may be traced by who has its rights.
        assert len([line for line in reported if line.startswith("traced")]) <= 1
        assert reported[0] == "Operation not permitted"
        assert reported.count("Operation not permitted") >= 3
        assert (await sandbox.exec(["echo", "alive"], timeout_s=20)).stdout == "alive\n"

    sandboxes.run(KINDS["docker"], main, profile="system")


def test_memory_and_files_of_the_agent_are_closed_to_the_sandbox_s_root(sandboxes: SharedSandboxes) -> None:
    sandboxes.run(KINDS["docker"], require_closed, profile="system")


def test_a_root_that_kills_everybody_leaves_a_sandbox_that_answers(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    everybody = "kill 1; prlimit --pid 1 --nofile=0 --cpu=0; kill -9 -1; kill -9 1; kill -STOP 1; sleep 600"

    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await backend.start(SandboxSpec(image=image(), profile="system"))
            assert isinstance(sandbox, AgentSandbox)
            shell = sandbox.shell()
            await shell.run("X=1", timeout_s=20)
            killed = await sandbox.exec(["sh", "-c", everybody], timeout_s=20)
            assert (killed.exit_code, killed.timed_out) == (-9, False)
            lost = await shell.run("echo on", timeout_s=20)
            assert (lost.exit_code, lost.is_shell_lost) == (-9, True)
            lost = await shell.run(everybody, timeout_s=20)
            assert (lost.exit_code, lost.is_shell_lost, lost.timed_out) == (-9, True, False)
            assert (await shell.run("echo on", timeout_s=20)).stdout == "on\n"
            assert (await sandbox.exec(["echo", "on"], timeout_s=20, user="grader")).stdout == "on\n"
            await sandbox.upload(tmp_path / "one", "one")
            assert await sandbox.read("one") == b"1"

    run(main)


def test_a_root_that_stops_everybody_holds_no_call_back_for_longer_than_its_time() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await backend.start(SandboxSpec(image=image(), profile="system"))
            assert isinstance(sandbox, AgentSandbox)
            await sandbox.shell().run("(sleep 0.3; kill -STOP -1) &", timeout_s=20)
            waiting = await sandbox.exec(["sh", "-c", "sleep 0.6; echo on"], timeout_s=1)
            assert (waiting.exit_code, waiting.timed_out) == (None, True)
            stopped = await sandbox.shell().run("echo on", timeout_s=0.5)
            assert (stopped.timed_out, stopped.is_shell_lost) == (True, True)
            assert (await sandbox.shell().run("echo on", timeout_s=20)).stdout == "on\n"
            assert (await sandbox.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"

    run(main)
