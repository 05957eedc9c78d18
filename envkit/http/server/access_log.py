"""The access log: one JSON line per request, and per socket when it closes, through a `logging` handler.

``at`` and ``time`` are the end (seconds since 1970, and ISO 8601), ``id`` is the request id, ``ms`` the duration,
``in`` and ``out`` are the bytes of bodies or messages. ``envs`` counts new sessions by environment, ``steps`` the
requested steps of a socket or list. Status 0 means that no answer was sent. Headers and query strings are not logged,
because they may contain tokens. A line has less than `MAX_LINE_BYTES` bytes: long texts are cut and end in an asterisk.

A thread writes the lines, so the server never waits for a slow disk or reader. Lines beyond `MAX_WAITING` queued ones
are dropped and counted.
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

_MOST_BYTES = MAX_LINE_BYTES - 2  # a line must be shorter than the limit, and the newline counts
_ITEMS = {"sessions": "session", "sandboxes": "sandbox"}
_JSON = msgspec.json.Encoder()
_log = logging.getLogger(__name__)


class AccessLog:
    """Writes the lines in batches after `DELAY_S`, because a `logging` record for each would cost more than the
    request.

    Args:
        handler: Target of the lines; only the log's thread uses it.
    """

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler
        self._lines: list[bytes] = []
        self._overflowed = 0
        self._queued = 0
        self._queue: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._thread: Thread | None = None
        # Only the log's thread changes the next three attributes.
        self._processed = 0
        self._failed = 0
        self._is_failing = False

    @property
    def dropped(self) -> int:
        """Lines that were not written, because the queue was full or the handler failed."""
        return self._overflowed + self._failed

    @classmethod
    def to(cls, path: Path | None) -> AccessLog:
        """Return a log that writes to the file `path`, which may be rotated, or to standard error if it is None.

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
        """Queue one line. Call it in an event loop. `messages` are the numbers of messages that a socket received and
        sent.
        """
        if self._queued - self._processed + len(self._lines) >= MAX_WAITING:
            self._overflowed += 1
            return
        if not path.isascii():  # some characters end lines or control terminals
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
        """Write the queued lines, for `stderr_log.CLOSE_S` at most, and close the handler."""
        self._flush()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(stderr_log.CLOSE_S)
            if self._thread.is_alive():  # closing could wait forever for the handler's lock
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
    """A file handler that raises errors instead of printing them."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            raise error
        super().handleError(record)


class _StandardError(logging.Handler):
    """Standard error; see `envkit.http.server.stderr_log.write`."""

    def createLock(self) -> None:  # noqa: N802
        self.lock = None  # no lock: only one thread uses the handler, and the end of the process must not wait

    def emit(self, record: logging.LogRecord) -> None:
        stderr_log.write(f"{self.format(record)}\n".encode())


def _shortened(fields: dict[str, Any]) -> bytes:
    """Return a line that fits, with the longest texts cut."""
    texts = {name: _plain(text) for name, text in fields.items() if isinstance(text, str)}
    left_bytes = _MOST_BYTES - len(_JSON.encode({**fields, **dict.fromkeys(texts, "")}))
    for done, name in enumerate(sorted(texts, key=lambda name: len(texts[name]))):
        text, most = texts[name], left_bytes // (len(texts) - done)
        texts[name] = text if len(text) <= most else text[: most - 1] + "*"
        left_bytes -= len(texts[name])
    return _JSON.encode({**fields, **texts})


def _plain(text: str) -> str:
    """Replace each character of `text` that needs more than one byte in JSON by a question mark."""
    return "".join(one if " " <= one <= "~" and one not in '"\\' else "?" for one in text[:MAX_LINE_BYTES])
