"""One promise for every kind of sandbox: it ends with the process that owns it, and with no other."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from envkit.sandbox.host import run_dirs
from tests.contract.kinds import (
    Kind,
    arguments,
    containers,
    groups_of,
    run,
    sleepers,
    until,
    volumes,
)
from tests.programs.program import Program

# Starts a sandbox of the given kind in which two processes sleep for the marker, prints a line, and waits.
OWNER = """
import signal, sys, anyio
from tests.contract.kinds import KINDS

async def main():
    async with KINDS[sys.argv[1]].sandbox("sh", "-c", "setsid sleep $0 & sleep $0", sys.argv[2]) as sandbox:
        print("ready", flush=True)
        while True:
            await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
            result = await sandbox.exec(["echo", "alive"], timeout_s=10)
            print("interrupted" if interrupted else "", result.stdout, flush=True)

interrupted = []
signal.signal(signal.SIGINT, lambda *_: interrupted.append(1))
anyio.run(main)
"""

CGROUPS = Path("/sys/fs/cgroup")
# At each line of input, forks a process that starts, uses and stops sandboxes of a kind, three at once; prints its id,
# and when it has ended. Forking avoids the imports, which take a new process a second.
BUSY_OWNERS = """
import os, sys, anyio
from envkit import clock
from tests.contract.kinds import KINDS

async def main():
    kind = KINDS[sys.argv[1]]

    async def work():
        while True:
            sandbox = await backend.start(kind.spec("sh", "-c", "setsid sleep $0 & sleep $0", sys.argv[2]))
            await sandbox.exec(["true"], timeout_s=20)
            await sandbox.stop()

    async with kind.backend() as backend, anyio.create_task_group() as tasks:
        print(os.getpid(), flush=True)
        for _ in range(3):
            tasks.start_soon(work)

for line in sys.stdin:
    if not (owner := os.fork()):
        clock.run(main)
    os.waitpid(owner, 0)
    print("gone", flush=True)
"""


@pytest.fixture
def owner(kind: Kind, marker: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a sandbox, which the test may treat as it likes; `marker` sleeps in the sandbox."""
    process = Program(
        [sys.executable, "-c", OWNER, kind.name, marker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def busy_owners(kind: Kind, marker: str) -> Iterator[subprocess.Popen[str]]:
    """A process that makes others that start and stop sandboxes in which `marker` sleeps."""
    arguments = [sys.executable, "-c", BUSY_OWNERS, kind.name, marker]
    with Program(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def names_of_processes() -> Iterator[bytes]:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            yield (arguments(int(process.name)) or [b""])[0]


def named_after(pid: int) -> list[str]:
    """The names of bubblewraps that process `pid` has started, which end a moment after it."""
    return [str(name) for name in names_of_processes() if name.startswith(b"envkit-") and b"-%d-" % pid in name]


def is_over(pid: int, marker: str) -> bool:
    """Whether nothing that process `pid` has started runs any more."""
    return not sleepers(marker) and not named_after(pid)


def left_by(pid: int) -> list[str]:
    """Traces of the sandboxes of process `pid`: processes, folders, notes, mounts, containers in any state, volumes."""
    here = f"-{pid}-"
    found = [str(path) for root in run_dirs.roots() for path in root.glob(f"envkit-*{here}*")]
    found += named_after(pid)
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if here in line]
    return [*found, *containers(pid), *volumes(pid)]


@pytest.mark.slow
def test_of_an_owner_killed_at_any_moment_nothing_is_left_after_one_restart(
    busy_owners: subprocess.Popen[str], kind: Kind, marker: str
) -> None:
    moments = random.Random(7)
    orders, answers = busy_owners.stdin, busy_owners.stdout
    assert orders is not None
    assert answers is not None

    async def main() -> None:
        for _ in range(3):
            orders.write("\n")
            orders.flush()
            owner = int(answers.readline())
            await anyio.sleep(moments.uniform(0.0, 0.7))
            groups = {group for pid in sleepers(marker) for group in groups_of(pid)}
            groups = {group for group in groups if group.parent != CGROUPS}  # of who is just ending
            os.kill(owner, signal.SIGKILL)
            assert answers.readline() == "gone\n"
            async with kind.backend():
                await until(partial(is_over, owner, marker))
                if containers(
                    owner, state="created"
                ):  # the daemon was still creating it, so only the next call finds it
                    async with kind.backend():
                        pass
                assert left_by(owner) == []
                assert [group for group in groups if group.exists()] == []

    run(main, timeout_s=300)


def test_neither_an_interrupt_at_the_terminal_nor_the_next_owner_ends_the_sandboxes_of_the_living(
    owner: subprocess.Popen[str], kind: Kind, marker: str
) -> None:
    async def main() -> None:
        await until(lambda: len(sleepers(marker)) == 2)
        os.killpg(owner.pid, signal.SIGINT)
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdin.write("well?\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "interrupted alive\n"
        async with kind.backend():
            assert len(sleepers(marker)) == 2
            assert len([path for root in run_dirs.roots() for path in root.glob(f"envkit-*-{owner.pid}-*")]) == 1

    run(main)
