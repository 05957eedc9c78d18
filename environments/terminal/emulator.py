"""A terminal emulator that reports only what is new: `pyte` with scrollback, the alternate screen, and bounded work.

Output that is not valid, such as that of binary files, never raises. Terminal queries get no answer.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections import deque
from typing import Any

from pyte import Screen, Stream
from pyte.modes import DECCOLM, DECSCNM
from wcwidth import wcwidth

MAX_SCROLLBACK = 1000
"""Maximum number of lines that are kept above the screen."""

_ALTERNATE = frozenset({47, 1047, 1049})
"""Private modes that switch to the alternate screen."""
_CURSOR_KEYS = 1 << 5
"""The private mode 1, as pyte stores it: the arrow keys send the sequences of the application mode."""
_IGNORED = frozenset({DECCOLM >> 5, DECSCNM >> 5})
"""Private modes that are ignored: 132 columns, and reverse video."""

_MAX_MARKS = 4
"""Maximum number of combining characters, such as accents, that are kept of one character."""


class Emulator:
    """A screen of `rows` by `columns` characters with scrollback."""

    def __init__(self, rows: int, columns: int) -> None:
        self._screen = _Screen(columns, rows)
        self._stream = _Stream(self._screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_full_screen(self) -> bool:
        """Whether a full-screen program, such as an editor, has switched to the alternate screen."""
        return self._screen.main is not None

    @property
    def has_application_keys(self) -> bool:
        """Whether the program expects the arrow keys' sequences of the application mode."""
        return _CURSOR_KEYS in self._screen.mode

    def feed(self, content: bytes) -> None:
        """Process output. It takes at most some milliseconds per KiB."""
        self._stream.feed(self._decoder.decode(content))

    def skip(self) -> int:
        """Prepare for output from which a part is missing: the next byte begins outside of any escape sequence.

        Lines before the missing part are not new any more; their number is returned.
        """
        self._decoder.reset()
        self._stream = _Stream(self._screen)
        if self.is_full_screen:
            return 0
        before, self._screen.first_new = self._screen.first_new, self._screen.scrolled + self._screen.cursor.y
        return self._screen.first_new - before

    def take(self) -> tuple[str, int]:
        """Return what is new since the last call, and the number of new lines that are not kept.

        That is the line of the cursor at the last call and all later ones, or from the first line above it that was
        written since. It is the whole screen while a full-screen program runs, and after it.
        """
        screen = self._screen
        lines = [*screen.history, *(screen.text_of(row) for row in range(screen.lines))]
        first = screen.scrolled - len(screen.history)
        start = max(0, screen.scrolled if self.is_full_screen else screen.first_new, first)
        lost = 0 if self.is_full_screen else max(0, first - screen.first_new)
        screen.first_new = screen.scrolled + screen.cursor.y
        return "\n".join(lines[start - first :]).rstrip("\n"), lost


class _Screen(Screen):
    """A screen of pyte that keeps what scrolls off its top.

    Attributes:
        history: The last lines above the screen.
        scrolled: Number of lines that have scrolled off the top. The first line of the screen has this number.
        first_new: Number of the first line that is new for the reader.
        main: Buffer and cursor of the main screen while the alternate screen is shown; otherwise None.
    """

    def __init__(self, columns: int, lines: int) -> None:
        self.history: deque[str] = deque(maxlen=MAX_SCROLLBACK)
        self.scrolled = self.first_new = 0
        self.main: tuple[Any, Any] | None = None
        super().__init__(columns, lines)

    def text_of(self, row: int) -> str:
        line = self.buffer.get(row)
        return "" if not line else "".join(line[x].data for x in range(max(line) + 1)).rstrip()

    def reset(self) -> None:
        super().reset()
        self.main = None
        self.first_new = self.scrolled

    def draw(self, data: str) -> None:
        self.first_new = min(self.first_new, self.scrolled + self.cursor.y)
        super().draw(data if data.isascii() else _drawable(data))

    def index(self) -> None:
        is_scrolling = self.cursor.y == (self.margins.bottom if self.margins else self.lines - 1)
        if is_scrolling and self.main is None and not (self.margins and self.margins.top):
            self.history.append(self.text_of(0))
            self.scrolled += 1
        super().index()

    def erase_in_display(self, how: int = 0, *args: Any, **kwargs: Any) -> None:
        """Erase whole lines at once. The library erases them by character, which a hostile program can make slow."""
        rows = {0: range(self.cursor.y + 1, self.lines), 1: range(self.cursor.y)}.get(how, range(self.lines))
        for row in rows:
            self.buffer.pop(row, None)
        if how in (0, 1):
            self.erase_in_line(how)
        elif self.main is None:
            self.first_new = self.scrolled

    def alignment_display(self) -> None:
        """Ignore this test pattern, because drawing it is slow."""

    def save_cursor(self) -> None:
        self.savepoints.clear()
        super().save_cursor()

    def set_mode(self, *modes: int, **kwargs: Any) -> None:
        if kwargs.get("private"):
            if _ALTERNATE.intersection(modes) and self.main is None:
                self.main = self.buffer.copy(), self.cursor
                self.cursor = type(self.cursor)(self.cursor.x, self.cursor.y)
                self.buffer.clear()
            modes = tuple(mode for mode in modes if mode not in _IGNORED)
        super().set_mode(*modes, **kwargs)

    def reset_mode(self, *modes: int, **kwargs: Any) -> None:
        if kwargs.get("private"):
            if _ALTERNATE.intersection(modes) and self.main is not None:
                buffer, self.cursor = self.main
                self.buffer.clear()
                self.buffer.update(buffer)
                self.main, self.margins = None, None
                self.first_new = self.scrolled
            modes = tuple(mode for mode in modes if mode not in _IGNORED)
        super().reset_mode(*modes, **kwargs)


class _Stream(Stream):
    """A parser of pyte that ignores the sequences which the library rejects with an exception."""

    def _send_to_parser(self, data: str) -> bool | None:
        try:
            return super()._send_to_parser(data)
        except Exception:  # the library raises various ones, and has then reset itself
            return True


def _drawable(text: str) -> str:
    """Drop what the library cannot draw.

    That are characters without width, such as emoji selectors, after which it would drop the rest of the text; and
    combining characters at the start or beyond `_MAX_MARKS`, since thousands on one character would take minutes.
    """
    kept, marks = [], _MAX_MARKS
    for char in text:
        is_mark = unicodedata.combining(char) > 0
        marks = marks + 1 if is_mark else 0
        if wcwidth(char) > 0 or (is_mark and marks <= _MAX_MARKS):
            kept.append(char)
    return "".join(kept)
