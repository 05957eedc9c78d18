"""Autoscaling: calls a function or program with the number of sandboxes by which the fleet should grow or shrink."""

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
    """Poll `wanted` until cancelled. Call `act` whenever two polls in a row ask for a change in the same direction.

    Args:
        wanted: Returns the number of sandboxes that the fleet lacks, or minus the number that it can do without.
        act: Called with the change that is closer to 0. If it raises, the exception is logged and polling continues.
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
                _log.exception("autoscaling failed to change the number of sandboxes by %d", steady)
        before = now


def steadily(before: int, now: int) -> int:
    """Return the change that is closer to 0 if both are positive or both are negative; otherwise 0."""
    if min(before, now) > 0:
        return min(before, now)
    return max(before, now) if max(before, now) < 0 else 0


async def run_command(command: Sequence[str], wanted: int, *, within_s: float = 300.0) -> None:
    """Run the operator's program `command` with `wanted` as an additional last argument; log its output if it fails.

    After `within_s` seconds, the program and its child processes (its process group) are killed.
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
    with anyio.CancelScope(shield=True):  # a process whose start is cancelled could not be found and killed
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
