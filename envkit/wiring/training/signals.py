"""Signal handlers that request a graceful stop at the first SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from envkit import clock

ONE_S = 2.0
"""Seconds after the first signal during which more signals are ignored, because the program `timeout` and batch systems
send a signal to a process and then also to its process group."""


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
