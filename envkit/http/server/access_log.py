"""The access log: one JSON line a request, and one a socket when it closes, through a handler of `logging`.

``at`` and ``time`` are when it ended (seconds since 1970, and ISO 8601), ``id`` the request's, ``ms`` how long it took,
``in`` and ``out`` are the bytes of bodies or messages. ``envs`` are the sessions that were made, by environment, and
``steps`` the steps that were asked for, over a socket or in a list. A status of 0 means that nothing was answered.
Neither headers nor query strings are written, so no token is. Each line has less than `MAX_LINE_BYTES` bytes, whatever
was asked: long texts are cut, and end in an asterisk.

A thread writes them, so that the server waits for nobody who is to read or keep them: `MAX_WAITING` lines wait for it,
and what is more is dropped and counted.
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
from threading import Thread  # noqa: TID251 (one that is stuck must not hold the loop at its end)
from typing import Any, Self

import msgspec

from envkit import clock
from envkit.http.server import stderr_log
from envkit.http.sessions.counters import StepMetrics

MAX_LINE_BYTES = 400

DELAY_S = 0.1
"""Seconds that a line may wait for others."""

MAX_WAITING = 10_000
"""Lines that wait to be written."""

_MOST_BYTES = MAX_LINE_BYTES - 2  # less than, and there is the end of the line
_ITEMS = {"sessions": "session", "sandboxes": "sandbox"}
_JSON = msgspec.json.Encoder()
_log = logging.getLogger(__name__)


class AccessLog:
    """Writes the lines, `DELAY_S` late: a record of `logging` costs more than a request, so one carries many of them.

    Args:
        handler: Where to; used by a thread, alone.
    """

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler
        self._lines: list[bytes] = []
        self._overflown = 0
        self._handed = 0
        self._queue: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._thread: Thread | None = None
        # The thread's own:
        self._taken = 0
        self._failed = 0
        self._is_failing = False

    @property
    def dropped(self) -> int:
        """Lines that were not written, since there were too many or they could not be."""
        return self._overflown + self._failed

    @classmethod
    def to(cls, path: Path | None) -> AccessLog:
        """Write to a file, which may be moved away meanwhile to begin a new one; None is standard error.

        Raises:
            OSError: The file cannot be written.
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
        played: StepMetrics | None = None,
    ) -> None:
        """Write one line, in an event loop; `messages` are those of a socket, in and out."""
        if self._handed - self._taken + len(self._lines) >= MAX_WAITING:
            self._overflown += 1
            return
        if not path.isascii():  # there are characters that end lines, or steer terminals
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
        if played is not None and played.envs:
            fields["envs"] = " ".join(f"{env_id}:{count}" for env_id, count in played.envs.most_common())
        if played is not None and played.steps:
            fields["steps"] = played.steps
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
        """Write what waits, unless that takes long, and close the handler."""
        self._flush()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(stderr_log.CLOSE_S)
            if self._thread.is_alive():  # it may hold the handler's lock
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
            self._handed += len(lines)
            self._queue.put(lines)

    def _run(self) -> None:
        while (lines := self._queue.get()) is not None:
            text = b"\n".join(lines).decode()
            try:
                self._handler.handle(logging.LogRecord("envkit.access", logging.INFO, "", 0, text, None, None))
            except OSError as error:
                self._failed += len(lines)
                if not self._is_failing:
                    _log.warning("the access log cannot be written: %s", error)
                self._is_failing = True
            else:
                self._is_failing = False
            self._taken += len(lines)


class _File(logging.handlers.WatchedFileHandler):
    """A file; what goes wrong is raised."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            raise error
        super().handleError(record)


class _StandardError(logging.Handler):
    """Standard error; see `envkit.http.server.stderr_log.write`."""

    def createLock(self) -> None:  # noqa: N802
        self.lock = None  # one thread uses it, and whoever ends the process must not wait for that

    def emit(self, record: logging.LogRecord) -> None:
        stderr_log.write(f"{self.format(record)}\n".encode())


def _shortened(fields: dict[str, Any]) -> bytes:
    """Return a line that has room, with as much of each long text as fits; what is short stays whole."""
    texts = {name: _plain(text) for name, text in fields.items() if isinstance(text, str)}
    room = _MOST_BYTES - len(_JSON.encode({**fields, **dict.fromkeys(texts, "")}))
    for left, name in enumerate(sorted(texts, key=lambda name: len(texts[name]))):
        text, most = texts[name], room // (len(texts) - left)
        texts[name] = text if len(text) <= most else text[: most - 1] + "*"
        room -= len(texts[name])
    return _JSON.encode({**fields, **texts})


def _plain(text: str) -> str:
    """Return `text` with a question mark for each character that would need more than one byte in JSON."""
    return "".join(one if " " <= one <= "~" and one not in '"\\' else "?" for one in text[:MAX_LINE_BYTES])
