"""A terminal in a sandbox that is used by typing keys and reading its screen.

The terminal runs bash. Its prompt contains two invisible marks, by which `Screen` notices that the typed commands have
ended. The screen of a full-screen program counts as complete when it has printed nothing for a moment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from envkit import clock
from envkit.protocols import Program, Sandbox

from ..tools.shell_tools import submit
from ..tools.tool import ToolFunction

if TYPE_CHECKING:
    from .emulator import Emulator

ROWS, COLUMNS = 40, 160

MAX_KEYS = 1 << 16
"""Maximum characters of the keys of one call."""

_KEYS = {
    "Enter": "\r",
    "Escape": "\x1b",
    "Tab": "\t",
    "BTab": "\x1b[Z",
    "Space": " ",
    "BSpace": "\x7f",
    "Backspace": "\x7f",
    "Up": "\x1b[A",
    "Down": "\x1b[B",
    "Right": "\x1b[C",
    "Left": "\x1b[D",
    "Home": "\x1b[1~",
    "End": "\x1b[4~",
    "Insert": "\x1b[2~",
    "Delete": "\x1b[3~",
    "PageUp": "\x1b[5~",
    "PageDown": "\x1b[6~",
    **{f"F{number}": f"\x1bO{final}" for number, final in enumerate("PQRS", 1)},
    **{f"F{number}": f"\x1b[{code}~" for number, code in enumerate((15, 17, 18, 19, 20, 21, 23, 24), 5)},
}
_CHORD = re.compile(r"([CM])-(.)")
_ARROWS = ("Up", "Down", "Right", "Left")

_ENTERING = frozenset(b"\r\n\x03\x04\x0f")
"""Bytes after which bash shows a new prompt: Enter, Ctrl-C, Ctrl-D and Ctrl-O."""

_IDLE, _PROMPT = b"\x1b]133;A\a", b"\x1b]133;B\a"
"""Marks that bash prints: before a prompt if no typed line is left to run, and at the end of each prompt."""
_ENV = {
    "PROMPT_COMMAND": r"builtin read -t 0 || builtin printf '\033]133;A\a' >/dev/tty",
    "PS1": r"\w\$ \[\e]133;B\a\]",
    "TERM": "screen",
    "LANG": "C.UTF-8",
    "HISTFILE": "",
    "NCURSES_NO_UTF8_ACS": "1",
}
_SHELL = ("bash", "--noprofile", "--norc")
_LIFETIME_S = 3600.0
"""Maximum seconds of a shell; servers refuse longer ones by default."""
_START_S = 10.0
"""Maximum seconds to wait for the first prompt of a shell."""
_QUIET_S = 0.3
"""Seconds without output after which the screen of a full-screen program, or an edited command, is complete."""
_SETTLE_S = 0.05
"""Seconds to wait for output that has been sent already."""
_PROMPT_S = 0.3
"""Maximum seconds to wait for the end of a prompt, which has no mark if the prompt was replaced."""
_MAX_BYTES = 64 << 10
"""Bytes of output that are drawn as they come. Of what follows in the same call, the last `_MAX_BYTES` are drawn."""
_MAX_DRAWING_S = 5.0
"""Maximum seconds of drawing in one call, after which the rest of its output is skipped."""
_PIECE_BYTES = 64
"""Bytes that are drawn before other tasks run."""

_ENDED = "[the shell has ended; the next keys go to a new one, without its folder and variables]"
_NOT_SENT = "[the shell had ended, so the keys were not sent; the next keys go to a new one]"


def encode_keys(keys: str | Sequence[str], *, application: bool = False, quotes_tabs: bool = False) -> bytes:
    """Return what a terminal sends for keys.

    Args:
        keys: Names of keys and texts, or only one. A name is one of ``Enter``, ``Escape``, ``Tab``, ``BTab``,
            ``Space``, ``BSpace``, ``Up``, ``Down``, ``Left``, ``Right``, ``Home``, ``End``, ``Insert``, ``Delete``,
            ``PageUp``, ``PageDown``, ``F1`` to ``F12``, ``C-x`` for Ctrl and a character, and ``M-x`` for Alt and a
            character. All other text is typed as it is, and a line end is the key Enter. A text of one TAB is the key
            Tab.
        application: Whether the arrow keys send the sequences of the application mode.
        quotes_tabs: Whether a TAB within a text is typed after Ctrl-V, so that bash inserts it, instead of completing a
            word.

    Raises:
        ValueError: There are more than `MAX_KEYS` characters.
    """
    parts = [keys] if isinstance(keys, str) else keys
    if sum(map(len, parts)) > MAX_KEYS:
        raise ValueError(f"more than {MAX_KEYS:,} characters of keys; send them in several calls")
    return b"".join(_sequence(part, application, quotes_tabs).encode(errors="replace") for part in parts)


def _sequence(part: str, application: bool, quotes_tabs: bool) -> str:
    if part in _KEYS:
        return _KEYS[part].replace("[", "O") if application and part in _ARROWS else _KEYS[part]
    chord = _CHORD.fullmatch(part)
    if chord is not None and chord[1] == "M":
        return "\x1b" + chord[2]
    if chord is not None and chord[2].upper() in "@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_":
        return chr(ord(chord[2].upper()) & 0x1F)
    text = part.replace("\r\n", "\r").replace("\n", "\r")
    return text.replace("\t", "\x16\t") if quotes_tabs and text != "\t" else text


class Screen:
    """A terminal with bash in the sandbox of an episode. Keys start a shell if none runs.

    Output is read only during calls. While more than about 1 MiB of it is unread, the programs in the terminal wait,
    and all other calls to the sandbox wait, too. Close the screen before you use the sandbox in another way.

    Attributes:
        tools: Functions that become the tools of an agent: `type_keys` and ``submit``.
        cwd: Folder in which shells start; None for the default of the sandbox.
    """

    def __init__(self) -> None:
        self.tools: Sequence[ToolFunction] = (self.type_keys, submit)
        self.cwd: str | None = None
        self._shell: _Shell | None = None

    async def type_keys(self, keys: str | list[str], sandbox: Sandbox, timeout_s: float, wait_s: float = 10.0) -> str:
        """Type keys in a terminal with bash, and return its screen of 40 lines. The result comes as soon as the
        shell's prompt is back, or after wait_s seconds. Programs keep running; type nothing to wait for them longer.

        Args:
            keys: Text to type, in which a line end is the Enter key; or the name of a key, such as Escape, Up,
                PageDown, C-c or F1. A list types several of these in order, such as ["Escape", ":wq", "Enter"].
            wait_s: Maximum seconds to wait.
        """
        if keys and self._shell is not None:
            # An older prompt must not count as the answer to these keys.
            await self._shell.receive(0 if self._shell.is_idle else _SETTLE_S)
            if self._shell.has_ended:
                return f"{await self._ended()}\n{_NOT_SENT}"
        if self._shell is None:
            shell = _Shell()
            await shell.start(sandbox, self.cwd)
            self._shell = shell
            await shell.receive(_START_S)
        shell, wait_s = self._shell, min(max(wait_s, 0.0), timeout_s)
        application = shell.emulator.has_application_keys
        await shell.send(encode_keys(keys, application=application, quotes_tabs=shell.is_idle))
        await shell.receive(wait_s, quiet_s=_QUIET_S if keys else None)
        if shell.has_ended:
            return f"{await self._ended()}\n{_ENDED}"
        text = shell.text()
        if not shell.is_idle and not shell.emulator.is_full_screen:
            text += f"\n[no prompt after {wait_s:g} s: a program still runs, or waits for input]"
        return text

    async def close(self) -> None:
        """End the shell and all programs that were started in it, before the sandbox is used otherwise; idempotent."""
        if self._shell is not None:
            shell, self._shell = self._shell, None
            await shell.close()

    async def _ended(self) -> str:
        """Forget the shell, which has ended, and return its last output."""
        assert self._shell is not None
        text = self._shell.text()
        await self.close()
        return text


class _Shell:
    """One bash in a terminal. `is_idle` says whether it was last seen waiting for a command."""

    emulator: Emulator

    def __init__(self) -> None:
        from .emulator import Emulator

        self.emulator = Emulator(ROWS, COLUMNS)
        self.is_idle = self.has_ended = False
        self._stack = AsyncExitStack()
        self._program: Program | None = None
        self._skipped_bytes, self._drawing_s = 0, 0.0

    async def start(self, sandbox: Sandbox, cwd: str | None) -> None:
        program = sandbox.program(_SHELL, timeout_s=_LIFETIME_S, env=_ENV, cwd=cwd, terminal=(ROWS, COLUMNS))
        self._program = await self._stack.enter_async_context(program)

    async def send(self, content: bytes) -> None:
        """Type `content`. An idle shell stays idle if the keys only edit its line, without Enter or Ctrl-D."""
        if content:
            assert self._program is not None
            self.is_idle = self.is_idle and not _ENTERING.intersection(content)
            await self._program.send(content)

    async def receive(self, wait_s: float, *, quiet_s: float | None = None) -> None:
        """Draw output until bash is idle, has ended, or `wait_s` seconds have passed.

        With `quiet_s`, the call also returns when a full-screen program or an idle shell has printed nothing for this
        time.
        """
        assert self._program is not None
        until, drawn_bytes, waiting_bytes, tail = clock.now() + wait_s, 0, 0, b""
        self._drawing_s = 0.0
        self.emulator.restart()
        while not self.has_ended:
            left_s = until - clock.now()
            at_prompt = _IDLE in tail
            if at_prompt and _PROMPT in tail.rpartition(_IDLE)[2]:
                break
            if at_prompt:
                left_s = min(left_s, _PROMPT_S)
            elif quiet_s is not None and (self.is_idle or self.emulator.is_full_screen):
                left_s = min(left_s, quiet_s)
            piece: tuple[str, bytes] | None = None
            with anyio.move_on_after(max(left_s, 0)) as scope:
                piece = await self._received()
            if piece is None and scope.cancelled_caught:
                break
            if piece is None:
                self.has_ended = True
                break
            tail = (tail + piece[1])[-_MAX_BYTES:]
            if drawn_bytes < _MAX_BYTES:
                drawn_bytes += len(piece[1])
                await self._draw(piece[1])
            else:
                waiting_bytes += len(piece[1])
        self.is_idle = self.is_idle or _IDLE in tail
        if waiting_bytes > _MAX_BYTES:
            self._skipped_bytes += waiting_bytes - _MAX_BYTES
            self.emulator.restart()
        if waiting_bytes:
            await self._draw(tail[-waiting_bytes:])

    def text(self) -> str:
        """Return the text of the screen, after a line that says how much output was skipped."""
        text, skipped, self._skipped_bytes = self.emulator.text(), self._skipped_bytes, 0
        return f"... {skipped:,} bytes of output were skipped ...\n{text}" if skipped else text

    async def close(self) -> None:
        await self._stack.aclose()

    async def _received(self) -> tuple[str, bytes] | None:
        assert self._program is not None
        try:
            return await self._program.receive()
        except Exception as error:
            await self._stack.__aexit__(type(error), error, error.__traceback__)  # raises the public exception
            raise

    async def _draw(self, content: bytes) -> None:
        for start in range(0, len(content), _PIECE_BYTES):
            if self._drawing_s > _MAX_DRAWING_S:
                self._skipped_bytes += len(content) - start
                return
            began = clock.stopwatch()
            self.emulator.feed(content[start : start + _PIECE_BYTES])
            self._drawing_s += clock.stopwatch() - began
            await anyio.lowlevel.checkpoint()
