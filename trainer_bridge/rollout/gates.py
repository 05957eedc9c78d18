"""Gates: when the turns of concurrent episodes may reach the engine. See `envkit.protocols.Gate`."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from envkit.protocols import Gate

_LOOK_S = 0.1
"""Seconds between two looks at the number of queued episodes."""


class OpenGate(Gate):
    """Lets every turn through at once. The engine then gets turns in the order in which the environments answer."""


class Lockstep:
    """A barrier at which the episodes of a wave wait for each other before each turn, by calling `together`.

    An episode that has not called `arrive` may need the slot of an episode that waits at the barrier. The wait for
    episodes that have not arrived is therefore limited, and does not include those that are known to be queued.

    Args:
        expected: Number of episodes in the wave.
        timeout_s: Maximum seconds to wait for episodes that have not arrived.
        queued: Returns how many episodes wait for a slot.
    """

    def __init__(self, expected: int, *, timeout_s: float, queued: Callable[[], int]) -> None:
        self._expected = expected
        self._timeout_s = timeout_s
        self._queued = queued
        self._present = 0
        self._waiting = 0
        self._gate = anyio.Event()

    def arrive(self) -> None:
        """Register an episode. From now on, the other episodes wait for it at each turn, without a time limit."""
        self._expected -= 1
        self._present += 1

    def leave(self, *, arrived: bool) -> None:
        """Stop waiting for an episode that has ended. `arrived` is whether the episode has called `arrive`."""
        if arrived:
            self._present -= 1
        else:
            self._expected -= 1
        self._open_if_all()

    async def together(self) -> None:
        """Wait until every other episode of the wave has called this method or `leave`.

        After `timeout_s` seconds, stop waiting for episodes that have not called `arrive`.
        """
        self._waiting += 1
        gate = self._gate
        self._open_if_all()
        try:
            if self._expected > 0:
                with anyio.move_on_after(self._timeout_s):
                    while not gate.is_set():
                        with anyio.move_on_after(_LOOK_S):
                            await gate.wait()
                        self._open_if_all()
                if gate.is_set():
                    return  # without another wait, so that episodes go on in the order in which they came
                self._timeout_s = 0.0
                self._open_if_all()
            await gate.wait()
        except BaseException:
            if not gate.is_set():
                self._waiting -= 1
            raise

    def _open_if_all(self) -> None:
        missing = self._expected - self._queued()
        complete = missing <= 0 or self._timeout_s <= 0
        if complete and self._waiting and self._waiting >= self._present:
            self._gate.set()
            self._gate = anyio.Event()
            self._waiting = 0
