"""Stopping a run on request or by a signal, after it has finished the work that must not be interrupted."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import anyio

from envkit import clock

ONE_S = 2.0
"""Seconds after the first signal during which more signals are ignored, because the program `timeout` and batch systems
send a signal to a process and then also to its process group."""


class Stop:
    """Cancels the block of `cancels` on request, and shows the user what work must finish before the run ends.

    Args:
        announce: Shows a line to the user.

    Attributes:
        is_requested: Whether a stop was requested.
    """

    def __init__(self, announce: Callable[[str], None] = lambda line: None) -> None:
        self.is_requested = False
        self._announce = announce
        self._announced = ""
        self._busy = "the current work to be cancelled, and for the sandboxes to stop"
        self._scope: anyio.CancelScope | None = None

    def request(self, advice: str = "") -> None:
        """Cancel the block of `cancels`, now or when it starts. Announce what the stop waits for, followed by `advice`.

        Repeated calls have no effect.
        """
        if not self.is_requested:
            self.is_requested = True
            self._announce_wait(advice)
            if self._scope is not None:
                self._scope.cancel()

    @contextmanager
    def cancels(self) -> Iterator[None]:
        """Run a ``with`` block that is cancelled when a stop is requested."""
        with anyio.CancelScope() as self._scope:
            if self.is_requested:
                self._scope.cancel()
            yield

    @contextmanager
    def waits_for(self, what: str) -> Iterator[None]:
        """If a stop is requested before or during a ``with`` block, announce that the stop waits for `what`."""
        outer, self._busy = self._busy, what
        if self.is_requested:
            self._announce_wait()
        try:
            yield
        finally:
            self._busy = outer

    def _announce_wait(self, advice: str = "") -> None:
        if self._announced != self._busy:
            self._announced = self._busy
            self._announce(f"stopping: waiting for {self._busy}{advice}")


@contextmanager
def stop_on_signals(request: Callable[[], object], *, now: Callable[[], float] = clock.stopwatch) -> Iterator[None]:
    """Call `request` in the running event loop at the first SIGINT or SIGTERM during a ``with`` block.

    Signals in the following `ONE_S` seconds are ignored. A later signal during the block ends the process immediately.

    If a signal came during the block, the handlers stay installed after the block: signals within `ONE_S` seconds of
    the first must not kill a process that prints its summary. Later ones go to the handler from before the block.

    In a thread other than the main thread, which receives no signals, the block runs without handlers. `now` returns
    the seconds of a monotonic clock.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    first_s: float | None = None
    has_ended = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if first_s is None:
            first_s = now()
            loop.call_soon_threadsafe(request)
        elif now() - first_s > ONE_S:
            signal.signal(number, (has_ended and old[number]) or signal.SIG_DFL)
            signal.raise_signal(number)

    old: dict[int, Any] = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        has_ended = True
        if first_s is None:
            for number, handler in old.items():
                signal.signal(number, handler)
