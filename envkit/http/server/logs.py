"""Logs of a server: its events on standard error, and the access log with one line of JSON per request.

A thread writes the lines, so that the server waits neither for a slow disk nor for a pipe that nobody reads. While
`MAX_WAITING` lines of a log wait, further lines are dropped and counted.
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
from threading import Thread  # noqa: TID251 (a blocked thread must not block process exit)

from envkit.runs.printable import printable

MAX_WAITING = 10_000
"""Maximum number of lines of one log that wait to be written."""

CLOSE_S = 2.0
"""Maximum seconds that `BackgroundHandler.close` waits until the last lines are written."""

_STANDARD_ERROR = 2


class BackgroundHandler(QueueHandler):
    """Log handler that formats records in the caller's thread, and writes them in a daemon thread.

    Args:
        write: Writes one line. Only the thread calls it, and it may block; it raises `OSError` if the line is lost.
        formatter: Formats the records.
    """

    queue: SimpleQueue[bytes]

    def __init__(self, write: Callable[[bytes], object], formatter: logging.Formatter) -> None:
        super().__init__(SimpleQueue())
        self.setFormatter(formatter)
        self.dropped = 0
        """Number of lines that were not written, because too many waited or writing failed."""
        self._write = write
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
        self.queue.put(b"")
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while line := self.queue.get():
            try:
                self._write(line)
            except OSError:
                self.dropped += 1


class JsonFormatter(logging.Formatter):
    """Formats a record whose `msg` is a mapping as one line of JSON in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(record.msg)


class _EventFormatter(logging.Formatter):
    """Formats a record with its time (UTC) and level, and without characters that could control a terminal."""

    converter = time.gmtime

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def access_log(path: Path | None) -> BackgroundHandler:
    """Return the handler of an access log in the file `path`, which may be rotated, or on standard error.

    Raises:
        OSError: The file cannot be opened for writing.
    """
    if path is None:
        return BackgroundHandler(_write_to_standard_error, JsonFormatter())

    def append(line: bytes) -> None:
        with path.open("ab") as file:  # open it for each line, because it may have been rotated
            file.write(line)

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


def _write_to_standard_error(line: bytes) -> None:
    while line:  # not `sys.stderr`: at exit, Python would wait for its lock, which a blocked thread holds
        line = line[os.write(_STANDARD_ERROR, line) :]
