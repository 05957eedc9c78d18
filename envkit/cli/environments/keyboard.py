"""Reads single keys from a terminal. At the end of the block of `keyboard`, the terminal gets its old mode back."""

from __future__ import annotations

import codecs
import os
import re
import select
import signal
import termios
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

UP, DOWN, LEFT, RIGHT = "up", "down", "left", "right"
ENTER = "enter"
BACKSPACE = "backspace"
ESCAPE = "escape"
CLEAR = "clear"
END = "end"
"""Ctrl-D, or the terminal was closed."""
RESIZED = "resized"
SUSPENDED = "suspended"
"""Ctrl-Z: `Keyboard.suspend` stops the program until it gets SIGCONT."""
UNKNOWN = "unknown"

_NAMES = {"\r": ENTER, "\n": ENTER, "\x7f": BACKSPACE, "\b": BACKSPACE, "\x15": CLEAR, "\x04": END}
_ARROWS = {"A": UP, "B": DOWN, "C": RIGHT, "D": LEFT}
_SEQUENCE = re.compile(r"\x1b[\[O][0-9;]*([A-Za-z~])")
_BEGINNING = re.compile(r"\x1b(?:[\[O][0-9;]*)?")
_SEQUENCE_S = 0.05
"""Seconds to wait for the rest of an escape sequence. If nothing follows, the key was Escape."""

_EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_EVENT_SIGNALS = {signal.SIGWINCH: RESIZED, signal.SIGTSTP: SUSPENDED}


class Keyboard:
    """Keys typed in a terminal.

    Args:
        terminal: File descriptor of the terminal.
        signals: File descriptor of a pipe that receives one byte per signal.
    """

    def __init__(self, terminal: int, signals: int) -> None:
        self._terminal = terminal
        self._signals = signals
        self._before = termios.tcgetattr(terminal)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._typed = ""

    def next(self) -> str:
        """Wait for a key or an event. Return the key's character, or a constant of this module such as `END`."""
        while not self._typed:
            ready, _, _ = select.select([self._terminal, self._signals], [], [])
            if self._signals in ready:
                arrived = os.read(self._signals, 256)
                for number, name in _EVENT_SIGNALS.items():
                    if number in arrived:
                        return name
            if self._terminal in ready and not self._read():
                return END
        while not (found := _SEQUENCE.match(self._typed)):
            if not _BEGINNING.fullmatch(self._typed) or not self._arrives():
                key, self._typed = self._typed[0], self._typed[1:]
                return ESCAPE if key == "\x1b" else _NAMES.get(key, key)
        self._typed = self._typed[found.end() :]
        return _ARROWS.get(found[1], UNKNOWN)

    def take(self) -> None:
        """Set the terminal's mode so that each key arrives immediately and is not printed."""
        tty.setcbreak(self._terminal, termios.TCSADRAIN)

    def give_back(self) -> None:
        """Restore the mode that the terminal had before `take`, and drop unread keys."""
        termios.tcsetattr(self._terminal, termios.TCSAFLUSH, self._before)

    def suspend(self) -> None:
        """Suspend the program, and return after SIGCONT."""
        self.give_back()
        signal.raise_signal(signal.SIGSTOP)
        self.take()

    def _arrives(self) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], _SEQUENCE_S)
        return bool(ready) and self._read()

    def _read(self) -> bool:
        try:
            data = os.read(self._terminal, 1024)
        except OSError:  # the terminal was closed
            data = b""
        self._typed += self._decoder.decode(data)
        return bool(data)


@contextmanager
def keyboard(terminal: int) -> Iterator[Keyboard]:
    """Read single keys from `terminal` during a ``with`` block. Works only in the main thread.

    Ctrl-C raises `KeyboardInterrupt`. SIGTERM, SIGHUP and SIGQUIT raise `SystemExit`, so that the terminal's mode is
    restored before the program ends.
    """
    with ExitStack() as undo:
        reader, writer = os.pipe()
        undo.callback(os.close, reader)
        undo.callback(os.close, writer)
        os.set_blocking(writer, False)
        undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
        keys = Keyboard(terminal, reader)
        undo.callback(keys.give_back)
        for number in _EXIT_SIGNALS:
            undo.callback(signal.signal, number, signal.signal(number, _exit))
        for number in _EVENT_SIGNALS:
            undo.callback(signal.signal, number, signal.signal(number, _ignore))
        keys.take()
        yield keys


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing, because `Keyboard.next` already reads the signal from the wakeup pipe."""
