"""The access log: one JSON line for each request, and for each WebSocket when it closes.

Fields of a line:

* ``at`` and ``time``: when the request or WebSocket ended, in seconds since 1970 and in ISO 8601.
* ``id``: the request id.
* ``ms``: the duration in milliseconds.
* ``in`` and ``out``: received and sent bytes, in bodies or WebSocket messages.
* ``envs``: number of new sessions for each environment.
* ``steps``: number of requested steps, for a WebSocket or a list of steps.
* ``status``: the HTTP status; 0 means that no answer was sent.

Headers and query strings are not logged, because they may contain tokens. A line has less than `MAX_LINE_BYTES` bytes:
long texts are cut and then end in an asterisk.

A thread writes the lines through a `logging` handler, so the server never waits for a slow disk or reader. If more than
`MAX_WAITING` lines are queued, further lines are dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from threading import Thread  # noqa: TID251 (a blocked one must not block the loop's shutdown)
from typing import Any, Self

import msgspec

from envkit import clock
from envkit.http.server import stderr_log
from envkit.http.sessions.counters import StepMetrics

MAX_LINE_BYTES = 400

DELAY_S = 0.1
"""Seconds for which lines are collected before they are written."""

MAX_WAITING = 10_000
"""Lines that may wait in the queue."""

# Subtract 2, because a line with its newline must be shorter than the limit.
_MOST_BYTES = MAX_LINE_BYTES - 2
_ITEMS = {"sessions": "session", "sandboxes": "sandbox"}
_JSON = msgspec.json.Encoder()
_log = logging.getLogger(__name__)


class AccessLog:
    """Writes the lines of the access log, in batches every `DELAY_S` seconds.

    Batches save time: a `logging` record for each line would cost more time than the request.

    Args:
        handler: Handler that writes the lines. Only the thread of the log uses it.
    """

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler
        self._lines: list[bytes] = []
        self._overflowed = 0
        self._queued = 0
        self._queue: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._thread: Thread | None = None
        # The thread of the log changes the following three attributes, so no other thread may do so.
        self._processed = 0
        self._failed = 0
        self._is_failing = False

    @property
    def dropped(self) -> int:
        """Number of lines that were not written, because the queue was full or the handler failed."""
        return self._overflowed + self._failed

    @classmethod
    def to(cls, path: Path | None) -> AccessLog:
        """Return a log that writes to the file `path`, or to standard error if `path` is None. The file may be rotated.

        Raises:
            OSError: The file cannot be opened for writing.
        """
        return cls(_StandardError() if path is None else _File(path, encoding="utf-8"))

    def write(
        self,
        *,
        id: str,
        tenant: str,
        method: str,
        path: str,
        status: int,
        seconds: float,
        bytes_in: int,
        bytes_out: int,
        messages: tuple[int, int] | None = None,
        step_metrics: StepMetrics | None = None,
    ) -> None:
        """Queue one line for writing. Call this in an event loop.

        `messages` contains the numbers of received and sent WebSocket messages.
        """
        if self._queued - self._processed + len(self._lines) >= MAX_WAITING:
            self._overflowed += 1
            return
        if not path.isascii():
            # Replace special characters: some end the line or control the terminal that shows the log.
            path = _plain(path)
        at = round(clock.wall(), 3)
        fields: dict[str, Any] = {
            "at": at,
            "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "id": id,
            "tenant": tenant,
            "method": method,
            "path": path,
            "status": status,
            "ms": round(seconds * 1000, 3),
            "in": bytes_in,
            "out": bytes_out,
        }
        if messages is not None:
            fields["messages_in"], fields["messages_out"] = messages
        if step_metrics is not None and step_metrics.envs:
            fields["envs"] = " ".join(f"{env_id}:{count}" for env_id, count in step_metrics.envs.most_common())
        if step_metrics is not None and step_metrics.steps:
            fields["steps"] = step_metrics.steps
        parts = path.split("/", 4)
        if len(parts) > 3 and parts[2] in _ITEMS:
            fields[_ITEMS[parts[2]]] = parts[3]
        line = _JSON.encode(fields)
        if len(line) > _MOST_BYTES:
            line = _shortened(fields)
        if not self._lines:
            asyncio.get_running_loop().call_later(DELAY_S, self._flush)
        self._lines.append(line)

    def close(self) -> None:
        """Write the queued lines, which takes `stderr_log.CLOSE_S` seconds at most, and close the handler."""
        self._flush()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(stderr_log.CLOSE_S)
            if self._thread.is_alive():
                # Do not close the handler: the thread may hold the handler's lock forever.
                return
        with suppress(OSError):
            self._handler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="access log", daemon=True)
                self._thread.start()
            self._queued += len(lines)
            self._queue.put(lines)

    def _run(self) -> None:
        while (lines := self._queue.get()) is not None:
            text = b"\n".join(lines).decode()
            try:
                self._handler.handle(logging.LogRecord("envkit.access", logging.INFO, "", 0, text, None, None))
            except OSError as error:
                self._failed += len(lines)
                if not self._is_failing:
                    _log.warning("cannot write the access log: %s", error)
                self._is_failing = True
            else:
                self._is_failing = False
            self._processed += len(lines)


class _File(logging.handlers.WatchedFileHandler):
    """A log handler for a file. It raises write errors; the standard handler would print them."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            raise error
        super().handleError(record)


class _StandardError(logging.Handler):
    """A log handler that writes to standard error with `envkit.http.server.stderr_log.write`."""

    def createLock(self) -> None:  # noqa: N802
        # Use no lock: only one thread uses the handler, and the process must not wait for a lock when it ends.
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        stderr_log.write(f"{self.format(record)}\n".encode())


def _shortened(fields: dict[str, Any]) -> bytes:
    """Encode the fields as a line within the size limit, and cut the longest texts to achieve this."""
    texts = {name: _plain(text) for name, text in fields.items() if isinstance(text, str)}
    left_bytes = _MOST_BYTES - len(_JSON.encode({**fields, **dict.fromkeys(texts, "")}))
    for done, name in enumerate(sorted(texts, key=lambda name: len(texts[name]))):
        text, most = texts[name], left_bytes // (len(texts) - done)
        texts[name] = text if len(text) <= most else text[: most - 1] + "*"
        left_bytes -= len(texts[name])
    return _JSON.encode({**fields, **texts})


def _plain(text: str) -> str:
    """Replace each character of `text` that takes more than one byte in JSON with a question mark."""
    return "".join(one if " " <= one <= "~" and one not in '"\\' else "?" for one in text[:MAX_LINE_BYTES])
