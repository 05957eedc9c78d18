"""Queue of suspect calls: calls that may have caused the loss of a worker are retried one at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

TURN_S = 20.0
"""Seconds that a call waits for its turn; longer than the detection of an unresponsive worker takes."""


class SuspectQueue:
    """Serializes suspect calls; one that has waited too long runs concurrently."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._unordered = 0
        self._ever_unordered = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Callable[[], bool]]:
        """Wait for a turn; the call is made in the block.

        Yields:
            A function that returns whether the call has run alone so far.
        """
        has_turn = False
        with anyio.move_on_after(TURN_S):
            await self._lock.acquire()
            has_turn = True
        if has_turn:
            was_alone, before = not self._unordered, self._ever_unordered
            try:
                yield lambda: was_alone and before == self._ever_unordered
            finally:
                self._lock.release()
        else:
            self._unordered += 1
            self._ever_unordered += 1
            try:
                yield lambda: False
            finally:
                self._unordered -= 1
