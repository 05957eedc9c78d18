"""The agent as process 1 of a sandbox: it reaps orphans, and programs can neither harm it nor gain privileges."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sandbox.agent.agent_process import Client, started

BUBBLEWRAP = (
    *("bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--as-pid-1"),
    *("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
    *("--cap-add", "CAP_KILL", "--cap-add", "CAP_CHOWN"),
    *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--perms", "1777", "--tmpfs", "/tmp"),
)

pytestmark = [
    pytest.mark.bwrap,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can give a sandbox its own users"),
]


@pytest.fixture
def sandbox() -> Iterator[Client]:
    # The sandbox's users cannot read root's home, so a Python that is installed there does not run.
    with started(Path("/tmp"), python="/usr/bin/python3", prefix=BUBBLEWRAP, agent_uid=1000, grader_uid=1001) as client:
        assert client.hello["pid"] == 1
        yield client


def zombies(sandbox: Client) -> int:
    states = sandbox.sh("cat /proc/[0-9]*/stat").out.decode().splitlines()
    return sum(state.rpartition(")")[2].split()[0] == "Z" for state in states)


def test_programs_have_no_privilege(sandbox: Client) -> None:
    status = sandbox.exec("cat", "/proc/self/status").out.decode()
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {lines[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
    assert (lines["Uid"].split()[0], lines["NoNewPrivs"]) == ("1000", "1")


def test_process_1_can_be_neither_killed_nor_read(sandbox: Client) -> None:
    answer = sandbox.sh("kill -9 1; kill -STOP 1; cat /proc/1/environ /proc/1/mem; ls /proc/1/fd; kill -TERM -1; true")
    assert answer.out == b""
    assert sandbox.call("ping")["end"] is True


def test_orphans_leave_no_zombies(sandbox: Client) -> None:
    for _ in range(5):
        sandbox.sh("for i in 1 2 3 4 5; do (setsid true &) ; (sleep 0.01 &) ; done; kill -9 $PPID")
        sandbox.shell("for i in 1 2 3; do (setsid sleep 0.01 &); done", name="keeps")
    sandbox.exec("sleep", "0.1")
    assert zombies(sandbox) == 0


def test_killing_every_process_ends_only_those_of_the_same_user(
    sandbox: Client, marker: str, sleepers: Callable[[], int]
) -> None:
    sandbox.shell("x=1")
    assert sandbox.sh(f"setsid sleep {marker} & kill -9 -1; sleep {marker}")["code"] == -9
    assert sleepers() == 0
    assert sandbox.shell("echo x")["state"] == "lost"  # its bash ran as the same user
    assert sandbox.exec("echo", "next").out == b"next\n"


def test_the_agent_user_can_neither_kill_the_grader_nor_read_its_files(sandbox: Client) -> None:
    number = sandbox.start("exec", argv=["sh", "-c", "umask 077; echo secret > /tmp/g; echo up; cat"], timeout_s=20,
                       user="grader", stdin=True, stream=True)  # fmt: skip
    assert sandbox.next(number)[1] == b"up\n"
    answer = sandbox.sh("kill -9 -1; cat /tmp/g; true")
    assert answer.out == b""
    sandbox.feed(number, b"still here")
    assert sandbox.answer(number).out == b"still here"


def test_the_sandbox_ends_when_its_channel_closes(sandbox: Client, marker: str, sleepers: Callable[[], int]) -> None:
    sandbox.shell(f"(setsid sleep {marker} &)")
    while sleepers() < 1:
        assert sandbox.call("ping")["end"] is True
    sandbox.line.close()
    assert sandbox.process is not None
    assert sandbox.process.wait(20) == 0
    assert sleepers() == 0


def test_only_processes_of_the_sandbox_are_counted(sandbox: Client) -> None:
    sandbox.shell("sleep 600 &")
    assert sandbox.call("stats")["processes"] in (5, 6)  # the agent, two lanes or one, bash, sleep
