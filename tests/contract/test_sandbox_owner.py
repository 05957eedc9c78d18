"""One promise for every kind of sandbox: it ends with the process that owns it, and with no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from envkit.sandbox import folders
from tests.contract.boxes import (
    Kind,
    containers,
    run,
    sleepers,
    until,
)

# Starts a box of the kind that it is told, in which two processes sleep for the marker, says so, and waits.
OWNER = """
import signal, sys, anyio
from tests.contract.boxes import KINDS

async def main():
    async with KINDS[sys.argv[1]].box("sh", "-c", "setsid sleep $0 & sleep $0", sys.argv[2]) as box:
        print("ready", flush=True)
        while True:
            await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
            result = await box.exec(["echo", "alive"], timeout_s=10)
            print("interrupted" if interrupted else "", result.stdout, flush=True)

interrupted = []
signal.signal(signal.SIGINT, lambda *_: interrupted.append(1))
anyio.run(main)
"""


@pytest.fixture
def owner(kind: Kind, marker: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a box, which the test may treat as it likes; `marker` sleeps in the box."""
    process = subprocess.Popen(
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


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_runs_on_when_the_owner_is_killed_and_the_next_one_clears_away(
    owner: subprocess.Popen[str], kind: Kind, marker: str, end: signal.Signals
) -> None:
    async def main() -> None:
        await until(lambda: len(sleepers(marker)) == 2)
        owner.send_signal(end)
        assert owner.wait(5) == -end
        await until(lambda: not sleepers(marker))
        async with kind.backend():
            assert [path for root in folders.roots() for path in root.glob(f"envkit-*-{owner.pid}-*")] == []
            assert containers(owner.pid) == []

    run(main)


def test_an_interrupt_at_the_terminal_does_not_reach_the_boxes(
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
        assert len(sleepers(marker)) == 2

    run(main)


def test_the_next_owner_leaves_the_boxes_of_the_living_alone(
    owner: subprocess.Popen[str], kind: Kind, marker: str
) -> None:
    async def main() -> None:
        await until(lambda: len(sleepers(marker)) == 2)
        async with kind.backend():
            assert len(sleepers(marker)) == 2
            assert len([path for root in folders.roots() for path in root.glob(f"envkit-*-{owner.pid}-*")]) == 1

    run(main)
