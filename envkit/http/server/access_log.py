"""The access log: one JSON line for each request, and for each WebSocket when it closes.

Fields of a line:

* ``at`` and ``time``: when the request or WebSocket ended, in seconds since 1970 and in ISO 8601.
* ``id``: the request id.
* ``ms``: the duration in milliseconds.
* ``in`` and ``out``: received and sent bytes, in bodies or WebSocket messages.
* ``envs``: the number of sessions that were created, for each environment.
* ``steps``: the number of requested steps, for a WebSocket or for a request with a list of steps.
* ``status``: the HTTP status; 0 means that no answer was sent.

Headers and query strings are not logged, because they may contain tokens. A line has less than `MAX_LINE_BYTES` bytes:
long texts are cut and then end in an asterisk.

A thread writes the lines, so the server never waits for a slow disk or reader. If more than `MAX_WAITING` lines are
queued, further lines are dropped and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec

from envkit import clock
from envkit.http.server import stderr_log
from envkit.http.sessions.counters import StepMetrics

MAX_LINE_BYTES = 400

DELAY_S = 0.1
"""Seconds for which lines are collected before they are written. Waking the thread for each line would cost more."""

MAX_WAITING = 10_000
"""Maximum number of lines that wait to be written."""

# Subtract 2, because a line with its newline must be shorter than the limit.
_MOST_BYTES = MAX_LINE_BYTES - 2
_ITEMS = {"sessions": "session", "sandboxes": "sandbox"}
_JSON = msgspec.json.Encoder()
_log = logging.getLogger(__name__)


class AccessLog:
    """Writes the lines of the access log, in batches every `DELAY_S` seconds.

    Args:
        write: Writes whole lines, in the thread of the log; raises `OSError` if the lines are lost.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write_lines = write
        self._failed = 0
        self._is_failing = False
        self._thread = stderr_log.LogThread(self._write_batch, MAX_WAITING, DELAY_S)

    @property
    def dropped(self) -> int:
        """Number of lines that were not written, because the queue was full or writing failed."""
        return self._thread.dropped + self._failed

    @classmethod
    def to(cls, path: Path | None) -> AccessLog:
        """Return a log that writes to the file `path`, or to standard error if `path` is None. The file may be rotated.

        Raises:
            OSError: The file cannot be opened for writing.
        """
        if path is None:
            return cls(stderr_log.write)

        def append(lines: bytes) -> None:
            with path.open("ab") as file:  # open it for each batch, because it may have been rotated
                file.write(lines)

        append(b"")
        return cls(append)

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
        """Queue one line for writing. `messages` contains the numbers of received and sent WebSocket messages."""
        if not path.isascii():
            # Replace special characters, because some of them end a line or control the terminal that shows the log.
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
        self._thread.put(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the queued lines, and stop."""
        self._thread.close()

    def _write_batch(self, lines: bytes) -> None:
        try:
            self._write_lines(lines)
            self._is_failing = False
        except OSError as error:
            self._failed += lines.count(b"\n")
            if not self._is_failing:
                _log.warning("cannot write the access log: %s", error)
            self._is_failing = True


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
