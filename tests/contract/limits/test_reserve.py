"""One promise for every kind of sandbox that bounds processes: a grader can start whatever the agent does."""

from __future__ import annotations

import shlex
from pathlib import Path

import anyio
import pytest

from envkit.errors import MissingFileError
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.types import SandboxUser
from tests.contract.kinds import LOCAL, Kind, run

PIDS = 64
on_local = pytest.mark.parametrize("kind", LOCAL, indirect=True)
USERS: tuple[SandboxUser, ...] = ("grader", "agent")
BOMBS = {
    "programs that start others": """
import os, time
while True:
    try:
        if os.fork() == 0:
            continue
    except OSError:
        open("full", "w").close()
        time.sleep(0.001)
""",
    "the dead that nobody counts": """
import os, time
while True:
    try:
        if os.fork() == 0:
            os._exit(0)
    except OSError:
        open("full", "w").close()
        time.sleep(0.001)
""",
    "threads": """
import threading, time
while True:
    try:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    except RuntimeError:
        open("full", "w").close()
        time.sleep(0.001)
""",
    "programs that left their session and ignore signals": """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
    except OSError:
        open("full", "w").close()
        time.sleep(0.001)
""",
}
LATER = """
import os, time
def grades():
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and b"grading" in open("/proc/%s/cmdline" % name, "rb").read():
                return True
        except OSError:
            pass
open("full", "w").close()
while not grades():
    time.sleep(0.01)
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
GRADE = """
import subprocess, sys, time
in_a_row, end = 0, time.monotonic() + 20
while in_a_row < 40 and time.monotonic() < end:  # "grading"
    time.sleep(0.02)
    try:
        in_a_row = in_a_row + 1 if subprocess.run(["true"]).returncode == 0 else 0
    except OSError:
        in_a_row = 0
print(in_a_row)
"""


@pytest.fixture(autouse=True)
def bounded(kind: Kind) -> None:
    kind.require("pids")


async def fill(sandbox: AgentSandbox, kind: Kind, bomb: str) -> None:
    """Run a program in the background of a shell until it says that it is where it wants to be."""
    await sandbox.write("bomb.py", bomb.encode())
    await sandbox.shell().run(f"{shlex.quote(kind.python)} bomb.py 2>/dev/null &", timeout_s=20)
    while True:
        try:
            await sandbox.read("full")
        except MissingFileError:
            await anyio.sleep(0.02)
        else:
            return


@on_local
def test_programs_of_the_agent_have_a_smaller_share_of_the_processors(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            sandbox = await backend.start(kind.spec(pids=PIDS))
            shown = [(await sandbox.exec(["nice"], user=user, timeout_s=20)).stdout for user in USERS]
            assert shown == ["0\n", "5\n"]

    run(main)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(pytest.param("local", name, marks=pytest.mark.bwrap) for name in BOMBS),
        pytest.param("docker", "threads", marks=pytest.mark.docker),
    ],
    indirect=["kind"],
)
def test_a_grader_runs_in_a_sandbox_that_the_agent_has_filled(kind: Kind, name: str) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            users: tuple[SandboxUser, ...] = ("grader", "root") if backend.capabilities()["uid"] else ("grader",)
            for user in users:
                sandbox = await backend.start(kind.spec(pids=PIDS))
                assert isinstance(sandbox, AgentSandbox)
                await fill(sandbox, kind, BOMBS[name])
                assert (await sandbox.exec(["true"], timeout_s=20)).exit_code == 126
                result = await sandbox.exec(["sh", "-c", "(true) && ls / | wc -l"], user=user, timeout_s=20)
                assert (result.exit_code, result.stderr) == (0, "")
                assert (await sandbox.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"
                after = await sandbox.shell().run("echo on", timeout_s=20)
                assert (after.exit_code, after.is_shell_lost) == (-9, True)
                assert (await sandbox.shell().run("echo on", timeout_s=20)).stdout == "on\n"

    run(main)


@on_local
def test_files_pass_both_ways_in_a_sandbox_that_the_agent_has_filled(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "one").write_text("1")

    async def main() -> None:
        async with kind.backend() as backend:
            sandbox = await backend.start(kind.spec(pids=PIDS))
            assert isinstance(sandbox, AgentSandbox)
            await fill(sandbox, kind, BOMBS["programs that start others"])
            await sandbox.write("answer", b"42")
            assert await sandbox.read("answer") == b"42"
            await sandbox.upload(tmp_path / "tests", "tests")
            await sandbox.download("tests", tmp_path / "back")
            assert (tmp_path / "back" / "one").read_text() == "1"

    run(main)


@on_local
def test_a_grader_keeps_its_room_when_the_agent_waits_for_it_to_begin(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            sandbox = await backend.start(kind.spec(pids=PIDS))
            assert isinstance(sandbox, AgentSandbox)
            await fill(sandbox, kind, LATER)
            result = await sandbox.exec([kind.python, "-c", GRADE], user="grader", timeout_s=60)
            # The few processes that it could not start were those of one moment.
            assert (result.exit_code, result.stdout) == (0, "40\n")
            assert (await sandbox.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"

    run(main)


@on_local
def test_what_leaves_room_runs_on_while_a_grader_does(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            sandbox = await backend.start(kind.spec(pids=PIDS))
            await sandbox.shell().run("for i in 1 2 3 4 5 6 7 8; do sleep 600 & done", timeout_s=20)
            many = "for i in 1 2 3 4 5 6 7 8; do sleep 0.2 & done; wait"
            assert (await sandbox.exec(["sh", "-c", many], user="grader", timeout_s=20)).exit_code == 0
            assert (await sandbox.shell().run("jobs -r | wc -l", timeout_s=20)).stdout.strip() == "8"

    run(main)


@on_local
def test_what_the_agent_runs_once_room_was_made_is_not_lost_with_what_was_ended(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            sandbox = await backend.start(kind.spec(pids=PIDS))
            for user in USERS:  # each has a process that waits for the next program
                await sandbox.exec(["true"], user=user, timeout_s=20)
            many = f"for n in $(seq {PIDS - 14}); do sleep 600 & done"
            assert (await sandbox.shell().run(many, timeout_s=20)).exit_code == 0
            codes = {}

            async def run_as(user: SandboxUser) -> None:
                codes[user] = (await sandbox.exec(["true"], user=user, timeout_s=20)).exit_code

            async with anyio.create_task_group() as tasks:  # so that one call comes close behind the other
                for user in USERS:
                    tasks.start_soon(run_as, user)
            assert codes == {"grader": 0, "agent": 0}
            assert (await sandbox.shell().run("jobs -r | wc -l", timeout_s=20)).is_shell_lost

    run(main)


@on_local
def test_the_sandboxs_own_command_is_not_killed_to_free_pids(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            sandbox = await backend.start(kind.spec("sleep", "600", pids=PIDS))
            assert isinstance(sandbox, AgentSandbox)
            await fill(sandbox, kind, BOMBS["programs that start others"])
            assert (await sandbox.exec(["true"], user="grader", timeout_s=20)).exit_code == 0
            assert (await sandbox.exec(["true"], timeout_s=20)).exit_code == 0

    run(main)
