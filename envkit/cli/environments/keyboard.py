"""Reads single keys from a terminal. At the end of the block of `keyboard`, the terminal gets its old mode back."""

from __future__ import annotations

import codecs
import os
import re
import signal
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

UP, DOWN, LEFT, RIGHT = "up", "down", "left", "right"
ENTER = "enter"
BACKSPACE = "backspace"
ESCAPE = "escape"
CLEAR = "clear"
END = "end"
"""Ctrl-D, or the terminal was closed."""
UNKNOWN = "unknown"

_NAMES = {"\r": ENTER, "\n": ENTER, "\x7f": BACKSPACE, "\b": BACKSPACE, "\x15": CLEAR, "\x04": END, "\x1b": ESCAPE}
_ARROWS = {"A": UP, "B": DOWN, "C": RIGHT, "D": LEFT}
_KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
"""Matches a key: an escape sequence, which a terminal sends at once, or a character."""


class Keyboard:
    """Keys typed in the terminal with this file descriptor.

    Attributes:
        on_resize: Called by the signal SIGWINCH, when the terminal was resized.
    """

    def __init__(self, terminal: int) -> None:
        self.on_resize: Callable[[], None] = lambda: None
        self._terminal = terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._typed: list[str] = []

    def next(self) -> str:
        """Wait for a key. Return its character, or a constant of this module such as `END`."""
        while not self._typed:
            try:
                data = os.read(self._terminal, 1024)
            except OSError:  # the terminal was closed
                data = b""
            if not data:
                return END
            self._typed = _KEY.findall(self._decoder.decode(data))
        key = self._typed.pop(0)
        return _NAMES.get(key, key) if len(key) == 1 else _ARROWS.get(key[-1], UNKNOWN)


@contextmanager
def keyboard(terminal: int) -> Iterator[Keyboard]:
    """Read single keys from `terminal` during a ``with`` block. Works only in the main thread.

    Ctrl-Z has no effect. Ctrl-C raises `KeyboardInterrupt`. SIGTERM, SIGHUP and SIGQUIT raise `SystemExit`, so that the
    terminal's mode is restored before the program ends.
    """
    keys = Keyboard(terminal)

    def call(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGWINCH:
            raise SystemExit(128 + number)
        keys.on_resize()

    with ExitStack() as undo:
        undo.callback(termios.tcsetattr, terminal, termios.TCSAFLUSH, termios.tcgetattr(terminal))  # drops unread keys
        for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH):
            undo.callback(signal.signal, one, signal.signal(one, call))
        undo.callback(signal.signal, signal.SIGTSTP, signal.signal(signal.SIGTSTP, signal.SIG_IGN))
        tty.setcbreak(terminal, termios.TCSADRAIN)  # each key arrives immediately and is not printed
        yield keys
