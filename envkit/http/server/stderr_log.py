"""A thread that writes the lines of a log, and a log on standard error that never blocks the server.

If standard error is a full pipe, writing blocks until a reader reads from the pipe. Therefore a thread writes the log.
It leaves space in the pipe for other writers. When the queue of the thread is full, lines are dropped.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import termios
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from select import PIPE_BUF, select
from threading import Event, Thread  # noqa: TID251 (a blocked thread must not block process exit)
from typing import Self

from envkit.runs.printable import printable

CLOSE_S = 2.0
"""Maximum seconds that `LogThread.close` waits until the last lines are written."""

MAX_WAITING = 1_000
"""Maximum number of log records that wait to be written."""

_FULL_S = 0.1
_STANDARD_ERROR = 2


class LogThread:
    """Writes lines in a thread, so that the caller never waits for a slow disk or reader.

    Args:
        write: Writes whole lines. Only the thread calls it, and it may block.
        max_waiting: Maximum number of lines that wait or are being written; further lines are dropped.
        delay_s: Seconds for which lines are collected before they are written together.
    """

    def __init__(self, write: Callable[[bytes], None], max_waiting: int, delay_s: float = 0.0) -> None:
        self._write = write
        self._max_waiting = max_waiting
        self._delay_s = delay_s
        self._lines: deque[bytes] = deque()
        self._has_lines = Event()
        self._is_closed = Event()
        self._queued = 0
        self._processed = 0  # changed only by the thread
        self.dropped = 0
        """Number of dropped lines."""
        self._thread = Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line, without its newline. Only one thread may call this at a time."""
        if self._queued - self._processed >= self._max_waiting:
            self.dropped += 1
            return
        self._queued += 1
        self._lines.append(line)
        self._has_lines.set()

    def close(self) -> None:
        """End the thread after it has written the queued lines. Wait for this at most `CLOSE_S` seconds."""
        self._is_closed.set()
        self._has_lines.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while self._lines or not self._is_closed.is_set():
            self._has_lines.wait()
            self._is_closed.wait(self._delay_s)
            self._has_lines.clear()  # before the lines are taken, so that a line that is queued now is not missed
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            if lines:
                self._write(b"\n".join([*lines, b""]))
            self._processed += len(lines)


class StandardErrorLog(logging.Handler):
    """Log handler that writes to standard error without blocking the caller. Use it as a context manager.

    It writes the time (UTC) and the level in front of each record, and records of envkit from the level INFO on.
    """

    def __init__(self) -> None:
        super().__init__()
        formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
        self.setFormatter(formatter)
        self._reported = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._thread.put(printable(self.format(record)).encode())

    def __enter__(self) -> Self:
        self._thread = LogThread(self._write, MAX_WAITING)
        logging.getLogger().addHandler(self)
        logging.getLogger("envkit").setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
        self.close()

    def close(self) -> None:
        """Write the queued records, and stop."""
        super().close()
        self._thread.close()

    def _write(self, text: bytes) -> None:
        dropped = self._thread.dropped
        if dropped > self._reported:
            text += b"%d log records dropped: standard error was not read\n" % (dropped - self._reported)
            self._reported = dropped
        with suppress(OSError):
            write(text)


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
