"""The last screen of a terminal, drawn by the optional package `pyte`.

Output that is not valid, such as that of binary files, never raises. Terminal queries get no answer.
"""

from __future__ import annotations

import codecs
import unicodedata

from pyte import Screen, Stream
from wcwidth import wcwidth

_FULL_SCREEN = frozenset(mode << 5 for mode in (47, 1047, 1049))
"""Private modes of full-screen programs, as pyte stores them. Their content remains on the screen when they end."""
_APPLICATION_KEYS = 1 << 5
"""The private mode 1, as pyte stores it."""


class Emulator:
    """A screen of `rows` by `columns` characters, without scrollback."""

    def __init__(self, rows: int, columns: int) -> None:
        self._screen = Screen(columns, rows)
        self.restart()

    @property
    def is_full_screen(self) -> bool:
        """Whether a full-screen program, such as an editor, has switched to the alternate screen."""
        return not _FULL_SCREEN.isdisjoint(self._screen.mode)

    @property
    def has_application_keys(self) -> bool:
        """Whether the program expects the arrow keys' sequences of the application mode."""
        return _APPLICATION_KEYS in self._screen.mode

    def restart(self) -> None:
        """Forget an incomplete escape sequence, so that the next byte does not belong to it."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stream = _Stream(self._screen)

    def feed(self, content: bytes) -> None:
        """Draw output. Hostile output takes up to 10 ms for each 3 bytes."""
        text = self._decoder.decode(content)
        if not text.isascii():
            # pyte drops the text that follows a character without width, and is slow if a character has many accents.
            text = "".join(char for char in unicodedata.normalize("NFC", text) if wcwidth(char))
        self._stream.feed(text)
        del self._screen.savepoints[:-1]

    def text(self) -> str:
        """Return the text of the screen, without spaces at the ends of its lines and empty lines at its end."""
        lines = (self._screen.buffer[row] for row in range(self._screen.lines))
        return "\n".join(
            "".join(line[x].data for x in range(max(line, default=-1) + 1)).rstrip() for line in lines
        ).rstrip("\n")


class _Stream(Stream):
    """A parser of pyte that ignores the sequences which the library rejects with an exception."""

    def _send_to_parser(self, data: str) -> bool | None:
        try:
            return super()._send_to_parser(data)
        except Exception:  # pyte raises many kinds of exceptions, and resets itself before
            return True
