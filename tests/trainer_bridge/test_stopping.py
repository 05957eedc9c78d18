"""A request to stop and the signals that make one: what it cancels, and the messages about the wait."""

from __future__ import annotations

import signal
import subprocess
import sys

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.trainer_bridge.stopping import Stop, stop_on_signals


def test_a_stop_reports_each_wait_in_turn() -> None:
    lines: list[str] = []
    stop = Stop(lines.append)
    with stop.waits_for("the update of train step 3"):
        stop.request("; more advice")
        stop.request("; not again")
    for _ in range(2):
        with stop.waits_for("the checkpoint of train step 3"):
            pass
    assert lines == [
        "stopping: waiting for the update of train step 3; more advice",
        "stopping: waiting for the checkpoint of train step 3",
    ]


def test_a_stop_cancels_the_block_that_runs_or_is_entered_later() -> None:
    async def main() -> list[str]:
        ended: list[str] = []
        stop = Stop()

        async def run(name: str) -> None:
            with stop.cancels():
                await anyio.sleep(3600)
            ended.append(f"{name} at {clock.now():g} s")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "running")
            await anyio.sleep(1)
            stop.request()
        await run("later")
        return ended

    assert clock.run(main, virtual=True) == ["running at 1 s", "later at 1 s"]


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("first", SIGNALS)
def test_signals_within_two_seconds_are_one_request(first: signal.Signals) -> None:
    second = signal.SIGINT
    before = [signal.getsignal(number) for number in SIGNALS]

    async def main() -> int:
        requests = 0
        seconds = 100.0
        asked = anyio.Event()

        def request() -> None:
            nonlocal requests
            requests += 1
            asked.set()

        with stop_on_signals(request, now=lambda: seconds):
            signal.raise_signal(first)
            await asked.wait()
            seconds = 102.0
            signal.raise_signal(second)
            await anyio.lowlevel.checkpoint()
        signal.raise_signal(second)  # after the block, as the process says how it ended
        return requests

    try:
        assert clock.run(main) == 1
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_without_a_signal_the_handlers_before_come_back() -> None:
    async def main() -> None:
        before = [signal.getsignal(number) for number in SIGNALS]
        with stop_on_signals(lambda: None):
            assert [signal.getsignal(number) for number in SIGNALS] != before
        assert [signal.getsignal(number) for number in SIGNALS] == before

    clock.run(main)


LATE = """
import signal
import anyio
from envkit import clock
from envkit.trainer_bridge.stopping import stop_on_signals

async def main():
    seconds = 0.0
    with stop_on_signals(lambda: None, now=lambda: seconds), anyio.CancelScope(shield=True):
        signal.raise_signal(signal.SIGINT)
        await anyio.sleep(0)
        print("goes on", flush=True)
        seconds = 2.1
        signal.raise_signal(signal.SIGINT)
        print("never printed", flush=True)

clock.run(main)
"""


def test_a_signal_after_two_seconds_ends_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "goes on\n", "")
