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
        yield client


def test_killing_every_process_ends_only_those_of_the_same_user(
    sandbox: Client, marker: str, sleepers: Callable[[], int]
) -> None:
    sandbox.shell("x=1")
    assert sandbox.sh(f"setsid sleep {marker} & kill -9 -1; sleep {marker}")["code"] == -9
    assert sleepers() == 0
    assert sandbox.shell("echo x")["state"] == "lost"  # its bash ran as the same user
    assert sandbox.exec("echo", "next").out == b"next\n"


def test_only_processes_of_the_sandbox_are_counted(sandbox: Client) -> None:
    sandbox.shell("sleep 600 &")
    assert sandbox.call("stats")["processes"] in (5, 6)  # the agent, two lanes or one, bash, sleep
