"""Reads the output of programs without blocking (`Output`), and stores the last bytes of an output (`OutputTail`)."""

from __future__ import annotations

import os

from .. import linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..event_loop import Loop

PIECE_BYTES = 1 << 16
_SLACK_BYTES = 1 << 20


class OutputTail:
    """Stores the last `limit` bytes of an output.

    Attributes:
        limit: Maximum number of stored bytes; may be changed at any time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept = bytearray()
        self._cut = 0

    def add(self, piece: bytes) -> None:
        self._kept += piece
        if len(self._kept) > self.limit + _SLACK_BYTES:
            self._trim()

    def take(self) -> tuple[bytes, int]:
        """Return the stored bytes and the number of bytes dropped since the last `take`; clear both."""
        self._trim()
        kept, cut = bytes(self._kept), self._cut
        self._kept, self._cut = bytearray(), 0
        return kept, cut

    def peek(self) -> bytes:
        """Return the stored bytes without clearing them."""
        self._trim()
        return bytes(self._kept)

    def _trim(self) -> None:
        excess = len(self._kept) - self.limit
        if excess > 0:
            del self._kept[:excess]
            self._cut += excess


class Output:
    """Reads a pipe or terminal without blocking, and closes it at the end of file."""

    def __init__(
        self,
        loop: Loop,
        fd: int,
        on_piece: Callable[[bytes], None],
        owner: object,
        on_over: Callable[[], None] | None = None,
    ) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._on_piece = on_piece
        self._on_over = on_over
        self._watch = loop.watch(fd, on_read=self._read, owner=owner)
        self._watch.want(read=True)
        self.is_open = True

    def pause(self, paused: bool) -> None:
        """Pause or resume reading."""
        if self.is_open:
            self._watch.want(read=not paused)

    def take_waiting(self, at_most: int | None = None) -> None:
        """Read the data that is available now, without waiting for more.

        Args:
            at_most: Approximate maximum in bytes; None for all bytes that a pipe contains now. A terminal needs a
                maximum, because the kernel does not reliably report how many bytes a terminal contains.
        """
        if at_most is None:
            at_most = linux.waiting_bytes(self._fd) if self.is_open else 0
        count = 1
        while self.is_open and count and at_most > 0:
            count = self._read()
            at_most -= count

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._watch.close()
            os.close(self._fd)

    def _read(self) -> int:
        """Read one piece and return its length; 0 if no data is available."""
        try:
            piece = os.read(self._fd, PIECE_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # Reading a terminal fails after the last process has closed it. Treat that as the end of file.
            piece = b""
        if piece:
            self._on_piece(piece)
        else:
            self.close()
            if self._on_over is not None:
                self._on_over()
        return len(piece)
