"""Autoscaling: call a callback with the number of sandboxes by which the fleet should grow or shrink."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import anyio

_log = logging.getLogger(__name__)

_OUTPUT_BYTES = 500


async def autoscale(wanted: Callable[[], int], act: Callable[[int], Awaitable[None]], interval_s: float) -> None:
    """Call `act` whenever two polls in a row ask for a change in the same direction, until cancelled.

    Args:
        wanted: Returns the number of sandboxes to add; negative to remove sandboxes.
        act: Called with the smaller of the two changes. Its exceptions are logged, and polling continues.
        interval_s: Seconds between two polls.
    """
    before = 0
    while True:
        await anyio.sleep(interval_s)
        now = wanted()
        if steady := steadily(before, now):
            try:
                await act(steady)
            except Exception:  # autoscaling failed, but the fleet still serves with its current capacity
                _log.exception("the autoscaling action failed (wanted change: %d sandboxes)", steady)
        before = now


def steadily(before: int, now: int) -> int:
    """Return the smaller of two changes in the same direction; 0 if the directions differ."""
    if min(before, now) > 0:
        return min(before, now)
    return max(before, now) if max(before, now) < 0 else 0


async def run_command(command: Sequence[str], wanted: int, *, within_s: float = 300.0) -> None:
    """Run a user's program with `wanted` as its last argument. If the program fails, its output is logged.

    On timeout its whole process group is killed.
    """
    words = [*command, str(wanted)]
    try:
        with anyio.fail_after(within_s):
            done = await _run(words)
    except TimeoutError:
        _log.warning("%s did not end within %g s and was stopped", command[0], within_s)
    except OSError as error:
        _log.warning("%s cannot be run: %s", command[0], error.strerror or error)
    else:
        if done.returncode:
            output = done.stdout[-_OUTPUT_BYTES:].decode(errors="replace").strip()
            _log.warning("%s %d exited with code %d: %s", command[0], wanted, done.returncode, output)


async def _run(words: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    output = bytearray()
    process = None
    with anyio.CancelScope(shield=True):  # a process that is cancelled while it starts would leave its children running
        process = await anyio.open_process(
            words, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
        )
    assert process is not None
    async with process:
        assert process.stdout is not None
        try:
            async for piece in process.stdout:
                output += piece
                del output[:-_OUTPUT_BYTES]
            code = await process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(words, code, bytes(output))
