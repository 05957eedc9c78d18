"""Logs of a server: its events on standard error, and the access log with one line of JSON per request.

A thread writes the lines in batches, so that the server waits neither for a slow disk nor for a pipe that nobody reads.
While `MAX_WAITING` lines of a log wait, further lines are dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from select import PIPE_BUF
from threading import Event, Thread  # noqa: TID251 (a blocked thread must not block process exit)

from envkit.runs.printable import printable

MAX_WAITING = 10_000
"""Maximum number of lines of one log that wait to be written."""

DELAY_S = 0.1
"""Seconds for which lines are collected before they are written. Waking the thread for each line would cost more."""

CLOSE_S = 2.0
"""Maximum seconds that `BackgroundHandler.close` waits until the last lines are written."""

_STANDARD_ERROR = 2


class BackgroundHandler(QueueHandler):
    """Log handler that formats records in the caller's thread, and writes them in a daemon thread.

    Args:
        write: Writes whole lines. Only the thread calls it, and it may block; it raises `OSError` if they are lost.
        formatter: Formats the records.
    """

    queue: SimpleQueue[bytes]

    def __init__(self, write: Callable[[bytes], object], formatter: logging.Formatter) -> None:
        super().__init__(SimpleQueue())
        self.setFormatter(formatter)
        self.dropped = 0
        """Number of lines that were not written, because too many waited or writing failed."""
        self._write = write
        self._is_closed = Event()
        self._thread = Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def prepare(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode()

    def enqueue(self, record: bytes) -> None:  # type: ignore[override]  # what `prepare` returns
        if self.queue.qsize() < MAX_WAITING:
            self.queue.put(record)
        else:
            self.dropped += 1

    def close(self) -> None:
        """End the thread after it has written the queued lines. Wait for this at most `CLOSE_S` seconds."""
        super().close()
        self._is_closed.set()
        self.queue.put(b"")  # wakes the thread
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while self.queue.qsize() or not self._is_closed.is_set():
            lines = [self.queue.get()]
            self._is_closed.wait(DELAY_S)
            lines += [self.queue.get() for _ in range(self.queue.qsize())]
            try:
                self._write(b"".join(lines))
            except OSError:
                self.dropped += sum(map(bool, lines))


class JsonFormatter(logging.Formatter):
    """Formats a record whose `msg` is a mapping as one line of JSON in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(record.msg)


class _EventFormatter(logging.Formatter):
    """Formats a record with its time (UTC) and level, and without characters that could control a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def access_log(path: Path | None) -> BackgroundHandler:
    """Return the handler of an access log in the file `path`, which may be rotated, or on standard error.

    Raises:
        OSError: The file cannot be opened for writing.
    """
    if path is None:
        return BackgroundHandler(_write_to_standard_error, JsonFormatter())

    def append(lines: bytes) -> None:
        with path.open("ab") as file:  # open it for each batch, because it may have been rotated
            file.write(lines)

    append(b"")
    return BackgroundHandler(append, JsonFormatter())


@contextmanager
def events_on_standard_error() -> Iterator[None]:
    """During a ``with`` block, log to standard error; the records of envkit from the level INFO on."""
    handler = BackgroundHandler(_write_to_standard_error, _EventFormatter())
    logging.getLogger().addHandler(handler)
    logging.getLogger("envkit").setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _write_to_standard_error(lines: bytes) -> None:
    while lines:
        # Up to PIPE_BUF bytes are written atomically, so that lines of two logs are not mixed. Do not use `sys.stderr`:
        # at exit, Python would wait for its lock, which a blocked thread holds.
        end = lines.rfind(b"\n", 0, PIPE_BUF) + 1 or PIPE_BUF
        lines = lines[os.write(_STANDARD_ERROR, lines[:end]) :]
