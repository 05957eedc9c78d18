"""Physics: what a move does, said once, for a board that is text and for a thousand boards that are arrays.

A move changes at most three cells in a row: the one that the player leaves, the one ahead and the one beyond. A rule
about the last two is asked once for every pair of symbols, when the physics is made; then playing is looking up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..board import MOVES, steps_of

STAY = len(MOVES)
"""Number of the action that does nothing, after the moves."""
EDGE = "\n"
"""What lies beyond the last cell of a row."""
CODES = 8
"""Room for the codes of symbols in an index: a power of two, so that two codes are joined by a shift."""

Rule = Callable[[str, str], "tuple[str, str] | None"]


class _MoveOutcome(NamedTuple):
    ahead: str
    beyond: str | None  # None when it stays as it is
    gain: int


class Tables(NamedTuple):
    """The physics for arrays. Codes are places in `Physics.symbols`; K is ``ahead * 8 + beyond``, S a code.

    Attributes:
        ahead_K: Code that the cell ahead gets.
        beyond_K: Code that the cell beyond gets.
        moves_K: Whether the player moves.
        gain_K: How many fewer wanted cells there are.
        left_S: Code that the player's cell gets when it is left; ``8 + S`` for moving, ``S`` for staying.
        is_fatal_S: Whether the player is lost on a cell of this code.
    """

    ahead_K: NDArray[np.uint8]
    beyond_K: NDArray[np.uint8]
    moves_K: NDArray[np.bool_]
    gain_K: NDArray[np.int16]
    left_S: NDArray[np.uint8]
    is_fatal_S: NDArray[np.bool_]


class Physics:
    """The rules of one game.

    Args:
        symbols: What a cell can be, at most 7; its code is its place here.
        players: What each symbol of the player leaves behind.
        rule: Given what is ahead of the player and beyond it (`EDGE` for nothing), what both become; None when nothing
            can move. It is never asked about a player ahead.
        wanted: The game is won when no cell shows this any more.
        done: What is shown in place of it when one is gone.
        fatal: The game is lost when the player shows as this; empty when it cannot be.
        reach: 2 when a move can change the cell beyond, otherwise 1.
    """

    def __init__(
        self,
        symbols: str,
        players: Mapping[str, str],
        rule: Rule,
        *,
        wanted: str,
        done: str,
        fatal: str = "",
        reach: int = 1,
    ) -> None:
        self.symbols = symbols
        self.players = "".join(players)
        self.wanted = wanted
        self.done = done
        self.fatal = fatal
        self.reach = reach
        self._left = dict(players)
        self._outcomes: dict[str, _MoveOutcome] = {}
        for ahead in symbols:
            for beyond in symbols + EDGE:
                after = None if ahead in players else rule(ahead, beyond)
                if after is not None:
                    gain = (ahead + beyond).count(wanted) - "".join(after).count(wanted)
                    self._outcomes[ahead + beyond] = _MoveOutcome(
                        after[0], after[1] if after[1] != beyond else None, gain
                    )

    def find_player(self, board: str) -> int:
        """Return the player's cell; -1 when there is none."""
        return max(board.find(player) for player in self.players)

    def move(self, cells: list[str], here: int, step: int) -> int | None:
        """Move the player in `cells` from `here` by `step` cells.

        Returns:
            How many fewer wanted cells there are; None when something stands in the way, and nothing was changed.
        """
        at = here + step
        past = at + step
        size = len(cells)
        if not 0 <= at < size:
            return None
        outcome = self._outcomes.get(cells[at] + (cells[past] if 0 <= past < size else EDGE))
        if outcome is None:
            return None
        ahead, beyond, gain = outcome
        cells[here] = self._left[cells[here]]
        cells[at] = ahead
        if beyond is not None:
            cells[past] = beyond
        return gain

    def play(self, board: str, move: str) -> str:
        """Return the board after `move`; the very same text when something stands in the way."""
        cells = list(board)
        gain = self.move(cells, self.find_player(board), steps_of(board.find("\n") + 1)[move])
        return board if gain is None else "".join(cells)

    def tables(self) -> Tables:
        """Return the same rules for arrays."""
        codes = {symbol: code for code, symbol in enumerate(self.symbols)}
        edge = CODES - 1
        ahead_K = (np.arange(CODES * CODES) // CODES).astype(np.uint8)
        beyond_K = (np.arange(CODES * CODES) % CODES).astype(np.uint8)
        moves_K = np.zeros(CODES * CODES, np.bool_)
        gain_K = np.zeros(CODES * CODES, np.int16)
        for pair, outcome in self._outcomes.items():
            k = codes[pair[0]] * CODES + codes.get(pair[1], edge)
            moves_K[k], gain_K[k], ahead_K[k] = True, outcome.gain, codes[outcome.ahead]
            if outcome.beyond is not None:
                beyond_K[k] = codes[outcome.beyond]
        left_S = np.tile(np.arange(CODES, dtype=np.uint8), 2)
        for player, left in self._left.items():
            left_S[CODES + codes[player]] = codes[left]
        is_fatal_S = np.zeros(CODES, np.bool_)
        is_fatal_S[[codes[symbol] for symbol in self.fatal]] = True
        return Tables(ahead_K, beyond_K, moves_K, gain_K, left_S, is_fatal_S)
