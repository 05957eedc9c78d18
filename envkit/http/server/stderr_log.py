"""A log on standard error that never blocks the server.

If standard error is a full pipe, writing blocks until a reader reads from the pipe. Therefore a thread writes the log,
and leaves space in the pipe for other writers. When the queue of the thread is full, log records are dropped.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import termios
from contextlib import suppress
from logging.handlers import QueueHandler
from queue import Full, Queue
from select import PIPE_BUF, select
from threading import Thread  # noqa: TID251 (a blocked one must not block process exit)
from typing import Self

CLOSE_S = 2.0
"""Seconds to write the last lines on close."""

MAX_WAITING = 1_000
"""Log records that may wait in the queue."""

_FULL_S = 0.1
_STANDARD_ERROR = 2


class StandardErrorLog(QueueHandler):
    """Log handler that writes to standard error without blocking the caller. Use it as a context manager."""

    def __init__(self) -> None:
        self._waiting: Queue[logging.LogRecord | None] = Queue(MAX_WAITING)
        super().__init__(self._waiting)
        self._dropped = 0
        self._thread = Thread(target=self._run, name="log", daemon=True)

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(record)
        except Full:
            self._dropped += 1

    def __enter__(self) -> Self:
        self._thread.start()
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
        with suppress(Full):
            self._waiting.put_nowait(None)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        reported = 0
        while (record := self._waiting.get()) is not None:
            text = f"{record.getMessage()}\n"
            dropped = self._dropped
            if dropped > reported:
                text += f"{dropped - reported} log records dropped: standard error was not read\n"
                reported = dropped
            with suppress(OSError):
                write(text.encode(errors="backslashreplace"))


def write(text: bytes) -> None:
    """Write `text` to standard error. Call this in a thread, because it blocks while nobody reads standard error.

    If standard error is a pipe, half of the pipe stays free for other writers, which a full pipe would block.

    Raises:
        OSError: Standard error cannot be written.
    """
    while text:
        while not _has_room():
            select([], [], [], _FULL_S)
        # Write at most PIPE_BUF bytes at a time. Such a write is atomic, so other writers cannot split it.
        end = text.rfind(b"\n", 0, PIPE_BUF) + 1 or PIPE_BUF
        text = text[os.write(_STANDARD_ERROR, text[:end]) :]


def _has_room() -> bool:
    """Return whether `PIPE_BUF` bytes can be written without blocking, and without filling more than half of a pipe."""
    if not select([], [_STANDARD_ERROR], [], _FULL_S)[1]:
        return False
    try:
        size = fcntl.fcntl(_STANDARD_ERROR, fcntl.F_GETPIPE_SZ)
    except (OSError, AttributeError):
        # Standard error is not a pipe, or the system cannot report the size of a pipe.
        return True
    used = struct.unpack("i", fcntl.ioctl(_STANDARD_ERROR, termios.FIONREAD, bytes(4)))[0]
    return bool(used + PIPE_BUF <= max(size // 2, PIPE_BUF))
