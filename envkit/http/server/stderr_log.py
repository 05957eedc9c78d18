"""Standard error, on which a server writes and for which it never waits: nobody may be there to read it.

A full pipe makes whoever writes to it wait until somebody reads. What a server says is therefore written by threads,
which leave room in a pipe for others; what is more than may wait is dropped.
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
from threading import Thread  # noqa: TID251 (one that is stuck must not hold the process at its end)
from typing import Self

CLOSE_S = 2.0
"""Seconds that the last lines may take at the end."""

MAX_WAITING = 1_000
"""Records of `logging` that wait to be written."""

_FULL_S = 0.1
_STANDARD_ERROR = 2


class StandardErrorLog(QueueHandler):
    """What this process logs, on standard error, for the length of a block, instead of where `logging` has it."""

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
        told = 0
        while (record := self._waiting.get()) is not None:
            text = f"{record.getMessage()}\n"
            dropped = self._dropped
            if dropped > told:
                text, told = f"{text}{dropped - told} records were dropped, since nobody read them\n", dropped
            with suppress(OSError):
                write(text.encode(errors="backslashreplace"))


def write(text: bytes) -> None:
    """Write `text`, in a thread of one's own, waiting for as long as nobody reads.

    In a pipe it leaves room for those who would wait for ever to write there.

    Raises:
        OSError: It cannot be written.
    """
    while text:
        while not _has_room():
            select([], [], [], _FULL_S)
        end = text.rfind(b"\n", 0, PIPE_BUF) + 1 or PIPE_BUF  # so much is written at once or not at all
        text = text[os.write(_STANDARD_ERROR, text[:end]) :]


def _has_room() -> bool:
    """Say whether `PIPE_BUF` bytes can be written, and of a pipe less than a half is taken."""
    if not select([], [_STANDARD_ERROR], [], _FULL_S)[1]:
        return False
    try:
        size = fcntl.fcntl(_STANDARD_ERROR, fcntl.F_GETPIPE_SZ)
    except (OSError, AttributeError):  # it is none; or not on this system
        return True
    taken = struct.unpack("i", fcntl.ioctl(_STANDARD_ERROR, termios.FIONREAD, bytes(4)))[0]
    return bool(taken + PIPE_BUF <= max(size // 2, PIPE_BUF))
