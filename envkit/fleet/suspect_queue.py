"""Calls that are made again one after the other, since each of them may be why a box was lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

TURN_S = 20.0
"""Seconds that a call waits for those before it; longer than it takes until a silent box counts as lost."""


class SuspectQueue:
    """Gives such calls their turn; one that has waited for long goes on without, beside whoever has it."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._beside = 0
        self._ever_beside = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Callable[[], bool]]:
        """Wait for the turn of a call, which is made in the block.

        Returns:
            What says whether no other one was made beside it so far.
        """
        has_turn = False
        with anyio.move_on_after(TURN_S):
            await self._lock.acquire()
            has_turn = True
        if has_turn:
            was_alone, before = not self._beside, self._ever_beside
            try:
                yield lambda: was_alone and before == self._ever_beside
            finally:
                self._lock.release()
        else:
            self._beside += 1
            self._ever_beside += 1
            try:
                yield lambda: False
            finally:
                self._beside -= 1
