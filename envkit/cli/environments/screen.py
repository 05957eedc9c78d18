"""Plays a game on a terminal: reads single keys, and redraws the board in place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from envkit.cli.environments import keyboard
from envkit.cli.environments.game import COLOURS, LOST, OUT_OF_MOVES, SOLVED, Game, Scene
from envkit.cli.environments.keyboard import Keyboard
from envkit.runs.printable import printable

_MOVES = {
    **dict.fromkeys((keyboard.UP, "w", "k"), "up"),
    **dict.fromkeys((keyboard.DOWN, "s", "j"), "down"),
    **dict.fromkeys((keyboard.LEFT, "a", "h"), "left"),
    **dict.fromkeys((keyboard.RIGHT, "d", "l"), "right"),
}
_ARROWS = set(_MOVES.values())
_HOW_TO_ANSWER = re.compile(r" ?[^.\n]*<answer>.*?</answer>\.?")
"""Matches the sentence of an environment's rules that explains the answer format, which only models need."""
_STYLES = {SOLVED: "bold green", LOST: "bold red", OUT_OF_MOVES: "bold yellow"}


def play_on_screen(game: Game, seed: int, console: Console, keys: Keyboard) -> None:
    """Play levels, from that of `seed`, until the user quits."""
    scene = game.begin(seed)
    notes = scene.notes
    if _ARROWS & _lower(scene.legal_moves):
        notes = _HOW_TO_ANSWER.sub("", notes).rstrip() + ("\nMove with the keys below the board." if notes else "")
    if notes:
        console.print(Text(printable(notes)))
        console.print()
    screen = _Screen(game, console, keys)
    with Live(console=console, auto_refresh=False, get_renderable=screen.drawn) as live:
        screen.run(live)


class _Screen:
    def __init__(self, game: Game, console: Console, keys: Keyboard) -> None:
        self._game = game
        self._console = console
        self._keys = keys
        self._message = ""  # shown until the next key press
        self._line: str | None = None  # the answer typed so far; None when no answer is being typed
        self._has_quit = False

    def run(self, live: Live) -> None:
        def redraw() -> None:
            self._console.clear()  # the terminal has re-wrapped the drawn lines
            live.refresh()

        self._keys.on_resize = redraw
        while not self._has_quit:
            live.refresh()
            key = self._keys.next()
            if key == keyboard.END:
                self._has_quit = True
            else:
                self._message = ""
                if self._line is None:
                    self._command(key)
                else:
                    self._line = self._edited(self._line, key)
        self._line = None
        live.refresh()

    def _command(self, key: str) -> None:
        scene = self._game.scene
        if key == "q":
            self._has_quit = True
        elif key == "r":
            self._game.begin(scene.seed)
        elif key == "n":
            self._game.begin(scene.seed + 1)
        elif scene.end is not None:
            self._message = "the episode is over: r restarts it, n starts the next level, q quits"
        elif key in (":", keyboard.ENTER):
            self._line = ""
        elif key == "?":
            self._message = self._hint()
        elif (move := _MOVES.get(key)) is not None:
            if move in _lower(scene.legal_moves):
                self._act(move)
            else:
                self._message = f"this environment has no move {move!r}; type : and then your answer"
        else:
            self._message = "unknown key; the last line lists the keys"

    def _edited(self, line: str, key: str) -> str | None:
        """Return the typed text `line` as it is after pressing `key`; None if the key sent or cancelled it."""
        if key == keyboard.ENTER:
            if line.strip():
                self._act(line)
            return None
        if key == keyboard.ESCAPE:
            return None
        if key == keyboard.CLEAR:
            return ""
        if key == keyboard.BACKSPACE:
            return line[:-1]
        return line + key if len(key) == 1 and key.isprintable() else line

    def _act(self, text: str) -> None:
        scene = self._game.act(self._game.answer(text))
        self._message = scene.notes
        if not scene.notes and scene.is_valid and scene.is_effective is False and scene.end is None:
            self._message = f"{text}: the way is blocked, nothing moved" if text in _ARROWS else f"{text}: no effect"

    def _hint(self) -> str:
        if self._game.expert is None:
            return "this environment has no expert"
        moves = self._game.hint()
        return f"hint: {' or '.join(moves)}" if moves else "the expert finds no solution from here"

    def drawn(self) -> Group:
        """Return the lines on screen, cut to the terminal's height. Lines at the top of the board are cut first."""
        width, height = self._console.size
        scene = self._game.scene
        head = [Text(f"{self._game.env_id}  seed {scene.seed}", style="bold")]
        foot = [Text(_figures(scene))]
        if scene.end is not None:
            foot.append(Text(_ending(scene), style=_STYLES.get(scene.end, "bold")))
        foot += _wrapped(self._message, self._console)
        foot.append(self._last_line(width))
        if scene.drawing is None:
            board = _wrapped(scene.text, self._console)
        else:
            pieces = COLOURS.split(scene.drawing)  # by turns text and colours
            safe = "".join(piece if number % 2 else printable(piece) for number, piece in enumerate(pieces))
            board = list(Text.from_ansi(safe).split("\n"))
        room = height - 1 - len(head) - len(foot)
        if room >= len(board) + 2:
            board = [Text(), *board, Text()]
        elif room < len(board):
            hidden = len(board) - max(0, room - 1)
            note = f"… {hidden} lines do not fit; the terminal needs {height + len(board) - room} lines"
            board = [Text(note, style="bold yellow"), *board[hidden:]] if room > 0 else []
        lines = [*head, *board, *foot][-max(1, height - 1) :]
        for line in lines:
            line.no_wrap = True
            line.overflow = "ellipsis"
        return Group(*lines)

    def _last_line(self, width: int) -> Text:
        """Return the answer that is being typed, or otherwise the list of keys."""
        if self._line is not None:
            return Text.assemble(": ", self._line[-max(1, width - 4) :], ("█", "blink"))
        return Text("  ".join(self._keys_now()), style="dim")

    def _keys_now(self) -> Iterator[str]:
        scene = self._game.scene
        if scene.end is None:
            if _ARROWS & _lower(scene.legal_moves):
                yield "arrows, wasd, hjkl move"
            yield ": answer"
            if self._game.expert is not None:
                yield "? hint"
        yield "r again"
        yield "n next"
        yield "q quit"


def _lower(moves: Iterable[str]) -> set[str]:
    return {move.lower() for move in moves}


def _figures(scene: Scene) -> str:
    shown = [f"turns {scene.turns}", f"return {scene.total:g}"]
    if scene.reward is not None:
        shown.append(f"last reward {scene.reward:g}")
    for name, value in (("valid", scene.is_valid), ("effective", scene.is_effective)):
        if value is not None:
            shown.append(f"{name} {'yes' if value else 'no'}")
    return "  ".join(shown)


def _ending(scene: Scene) -> str:
    ending = f"{scene.end} after {scene.turns} {'turn' if scene.turns == 1 else 'turns'}"
    return ending if scene.shortest is None else f"{ending}; the shortest solution has {scene.shortest} moves"


def _wrapped(text: str, console: Console) -> list[Text]:
    return list(Text(printable(text)).wrap(console, console.width)) if text else []
