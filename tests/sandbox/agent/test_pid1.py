"""The agent as the first process of a box: who is whose, who is left, and what the programs may do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sandbox.agent.agent_process import Client, started

BOX = (
    *("bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--as-pid-1"),
    *("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
    *("--cap-add", "CAP_KILL", "--cap-add", "CAP_CHOWN"),
    *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--perms", "1777", "--tmpfs", "/tmp"),
)

pytestmark = [
    pytest.mark.bwrap,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can give a box users of its own"),
]


@pytest.fixture
def box() -> Iterator[Client]:
    # Nothing below a home of root can be seen by the box's users, nor can a Python that lies there.
    with started(Path("/tmp"), python="/usr/bin/python3", prefix=BOX, agent_uid=1000, grader_uid=1001) as client:
        assert client.hello["pid"] == 1
        yield client


def zombies(box: Client) -> int:
    states = box.sh("cat /proc/[0-9]*/stat").out.decode().splitlines()
    return sum(state.rpartition(")")[2].split()[0] == "Z" for state in states)


def test_programs_have_no_privilege(box: Client) -> None:
    status = box.exec("cat", "/proc/self/status").out.decode()
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {lines[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
    assert (lines["Uid"].split()[0], lines["NoNewPrivs"]) == ("1000", "1")


def test_the_first_process_cannot_be_harmed_or_looked_into(box: Client) -> None:
    answer = box.sh("kill -9 1; kill -STOP 1; cat /proc/1/environ /proc/1/mem; ls /proc/1/fd; kill -TERM -1; true")
    assert answer.out == b""
    assert box.call("ping")["end"] is True


def test_orphans_leave_no_zombies(box: Client) -> None:
    for _ in range(5):
        box.sh("for i in 1 2 3 4 5; do (setsid true &) ; (sleep 0.01 &) ; done; kill -9 $PPID")
        box.shell("for i in 1 2 3; do (setsid sleep 0.01 &); done", name="keeps")
    box.exec("sleep", "0.1")
    assert zombies(box) == 0


def test_whoever_kills_everybody_kills_only_itself(box: Client, marker: str, sleepers: Callable[[], int]) -> None:
    box.shell("x=1")
    assert box.sh(f"setsid sleep {marker} & kill -9 -1; sleep {marker}")["code"] == -9
    assert sleepers() == 0
    assert box.shell("echo x")["state"] == "lost"  # its bash was somebody of the same user
    assert box.exec("echo", "next").out == b"next\n"


def test_a_grader_is_out_of_the_agents_reach(box: Client) -> None:
    number = box.start("exec", argv=["sh", "-c", "umask 077; echo secret > /tmp/g; echo up; cat"], timeout_s=20,
                       user="grader", stdin=True, stream=True)  # fmt: skip
    assert box.next(number)[1] == b"up\n"
    answer = box.sh("kill -9 -1; cat /tmp/g; true")
    assert answer.out == b""
    box.feed(number, b"still here")
    assert box.answer(number).out == b"still here"


def test_the_box_ends_with_the_channel(box: Client, marker: str, sleepers: Callable[[], int]) -> None:
    box.shell(f"(setsid sleep {marker} &)")
    while sleepers() < 1:
        assert box.call("ping")["end"] is True
    box.line.close()
    assert box.process is not None
    assert box.process.wait(20) == 0
    assert sleepers() == 0


def test_memory_and_processes_are_counted_for_the_box_alone(box: Client) -> None:
    box.shell("sleep 600 &")
    assert box.call("stats")["processes"] in (5, 6)  # the agent, two lanes or one, bash, sleep
