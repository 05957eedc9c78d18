"""Writes to pipes, sockets and terminals without blocking, such as the standard input of a program."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..event_loop import Loop

MAX_WAITING_BYTES = 64 << 20
"""Maximum number of bytes that a program has not yet read from its input. Above it, the program is killed."""


class Input:
    """Writes to a pipe, socket or terminal without blocking.

    Attributes:
        is_open: Whether the descriptor is open.
        waiting_bytes: Number of bytes that are not yet written.
    """

    def __init__(
        self,
        loop: Loop,
        fd: int,
        owner: object,
        on_written: Callable[[int], None] | None = None,
        on_closed: Callable[[], None] | None = None,
    ) -> None:
        os.set_blocking(fd, False)
        self.is_open = True
        self.waiting_bytes = 0
        self._fd = fd
        self._on_written = on_written
        self._on_closed = on_closed
        self._waiting: list[bytes] = []
        self._ends = False
        self._watch = loop.watch(fd, on_write=self._write, owner=owner)

    def add(self, piece: bytes) -> None:
        """Queue `piece` for writing. If the descriptor is closed, drop it but report it as written."""
        if not self.is_open:
            if piece and self._on_written is not None:  # so that the host can finish sending
                self._on_written(len(piece))
        elif piece:
            self._waiting.append(piece)
            self.waiting_bytes += len(piece)
            if len(self._waiting) == 1:
                self._write()

    def end(self) -> None:
        """Close the descriptor as soon as all queued data is written."""
        self._ends = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._waiting = []
            self.waiting_bytes = 0
            self._watch.close()
            os.close(self._fd)
            if self._on_closed is not None:
                self._on_closed()

    def _write(self) -> None:
        while self._waiting:
            try:
                written = os.write(self._fd, self._waiting[0])
            except BlockingIOError:
                self._watch.want(write=True)
                return
            except OSError:  # The other end is closed.
                self.close()
                return
            self.waiting_bytes -= written
            if written < len(self._waiting[0]):
                self._waiting[0] = self._waiting[0][written:]
            else:
                del self._waiting[0]
            if self._on_written is not None:
                self._on_written(written)
        if self._ends:
            self.close()
        else:
            self._watch.want(write=False)
