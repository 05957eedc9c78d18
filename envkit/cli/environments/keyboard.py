"""A terminal's keys, one at a time; the terminal is as it was before once the block ends, however it ends."""

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
"""Ctrl-D, or the terminal is gone."""
RESIZED = "resized"
SUSPENDED = "suspended"
"""Ctrl-Z: `Keyboard.suspend` stops the program until it is told to go on."""
UNKNOWN = "unknown"

_NAMES = {"\r": ENTER, "\n": ENTER, "\x7f": BACKSPACE, "\b": BACKSPACE, "\x15": CLEAR, "\x04": END}
_ARROWS = {"A": UP, "B": DOWN, "C": RIGHT, "D": LEFT}
_SEQUENCE = re.compile(r"\x1b[\[O][0-9;]*([A-Za-z~])")
_BEGINNING = re.compile(r"\x1b(?:[\[O][0-9;]*)?")
_SEQUENCE_S = 0.05
"""Seconds in which the rest of a key's sequence arrives; after that, Escape was pressed."""

_LEAVING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TOLD = {signal.SIGWINCH: RESIZED, signal.SIGTSTP: SUSPENDED}


class Keyboard:
    """The keys of the terminal `terminal`; `signals` gives a byte for every signal that arrived."""

    def __init__(self, terminal: int, signals: int) -> None:
        self._terminal = terminal
        self._signals = signals
        self._before = termios.tcgetattr(terminal)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._typed = ""

    def next(self) -> str:
        """Wait for a key: its character, or for other keys, and what else happens, one of this module's names."""
        while not self._typed:
            ready, _, _ = select.select([self._terminal, self._signals], [], [])
            if self._signals in ready:
                arrived = os.read(self._signals, 256)
                for number, name in _TOLD.items():
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
        """Have keys given out as they are pressed, and shown nowhere."""
        tty.setcbreak(self._terminal, termios.TCSADRAIN)

    def give_back(self) -> None:
        """Let the terminal be as it was, without what was pressed and not yet taken."""
        termios.tcsetattr(self._terminal, termios.TCSAFLUSH, self._before)

    def suspend(self) -> None:
        """Stop the program; returns when it is told to go on."""
        self.give_back()
        signal.raise_signal(signal.SIGSTOP)
        self.take()

    def _arrives(self) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], _SEQUENCE_S)
        return bool(ready) and self._read()

    def _read(self) -> bool:
        try:
            data = os.read(self._terminal, 1024)
        except OSError:  # the other end of the terminal was closed
            data = b""
        self._typed += self._decoder.decode(data)
        return bool(data)


@contextmanager
def keyboard(terminal: int) -> Iterator[Keyboard]:
    """Take over the keys of `terminal`.

    Ctrl-C raises `KeyboardInterrupt` as ever. A signal that asks the program to leave raises `SystemExit`, so that the
    block ends in order. Only for the main thread.
    """
    with ExitStack() as undo:
        told, tell = os.pipe()
        undo.callback(os.close, told)
        undo.callback(os.close, tell)
        os.set_blocking(tell, False)
        undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(tell, warn_on_full_buffer=False))
        keys = Keyboard(terminal, told)
        undo.callback(keys.give_back)
        for number in _LEAVING:
            undo.callback(signal.signal, number, signal.signal(number, _leave))
        for number in _TOLD:
            undo.callback(signal.signal, number, signal.signal(number, _nothing))
        keys.take()
        yield keys


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Let the byte that tells of the signal arrive."""
