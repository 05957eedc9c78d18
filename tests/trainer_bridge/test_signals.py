"""SIGINT and SIGTERM as one request to stop, with a clock that is moved by hand."""

from __future__ import annotations

import signal
import subprocess
import sys

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.trainer_bridge.stopping import stop_on_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_signals_within_two_seconds_are_one_request(first: signal.Signals, second: signal.Signals) -> None:
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
import signal, sys
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
        signal.raise_signal(getattr(signal, sys.argv[1]))
        print("never printed", flush=True)

clock.run(main)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_after_two_seconds_ends_the_process_at_once(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", LATE, name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-getattr(signal, name), "goes on\n", "")
