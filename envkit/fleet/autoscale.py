"""Autoscaling: the fleet says how many sandboxes more or fewer it wants room for, and somebody acts on it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import anyio

_log = logging.getLogger(__name__)

_SAID_BYTES = 500


async def autoscale(wanted: Callable[[], int], act: Callable[[int], Awaitable[None]], interval_s: float) -> None:
    """Act on what is wanted whenever it was wanted at two looks in a row, until cancelled.

    Args:
        wanted: Says how many more sandboxes there should be room for; less than 0: fewer would do.
        act: Told the smaller of the two wishes. What it raises is logged, and the next wish is told all the same.
        interval_s: Seconds between two looks.
    """
    before = 0
    while True:
        await anyio.sleep(interval_s)
        now = wanted()
        if steady := steadily(before, now):
            try:
                await act(steady)
            except Exception:  # whatever it is that adds nodes, what is there is served without it
                _log.exception("nobody could be told that %d more sandboxes are wanted", steady)
        before = now


def steadily(before: int, now: int) -> int:
    """Return what was wanted at both looks; 0 if the one wanted more and the other fewer."""
    if min(before, now) > 0:
        return min(before, now)
    return max(before, now) if max(before, now) < 0 else 0


async def run_command(command: Sequence[str], wanted: int, *, within_s: float = 300.0) -> None:
    """Run a user's program with one more argument, how many more are wanted; what it prints is logged if it fails.

    One that is stopped is stopped with what it has started, unless that left its process group.
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
            said = done.stdout[-_SAID_BYTES:].decode(errors="replace").strip()
            _log.warning("%s %d exited with code %d: %s", command[0], wanted, done.returncode, said)


async def _run(words: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    said = bytearray()
    process = None
    with anyio.CancelScope(shield=True):  # a process that is cancelled while it starts would leave its children
        process = await anyio.open_process(
            words, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
        )
    assert process is not None
    async with process:
        assert process.stdout is not None
        try:
            async for piece in process.stdout:
                said += piece
                del said[:-_SAID_BYTES]
            code = await process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(words, code, bytes(said))
