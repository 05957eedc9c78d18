"""The rules of moves in a board game. Single boards (text) and batches of boards (arrays) use the same rules.

A move changes at most three cells in a row: the player's cell, the cell ahead of the player, and the cell beyond that.
A new `Physics` evaluates its rule once for every pair of symbols in the last two cells. A move is then a lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..board import MOVES, steps_of

STAY = len(MOVES)
"""Index of the action that does nothing; it follows the indices of the moves."""
EDGE = "\n"
"""The symbol that stands for a cell off the board."""
CODES = 8
"""The 8 in the index of a pair of codes, ``ahead * 8 + beyond``: above every code, and a power of two for speed."""

Rule = Callable[[str, str], "tuple[str, str] | None"]


class _MoveOutcome(NamedTuple):
    ahead: str
    beyond: str | None  # None if unchanged
    gain: int


class Tables(NamedTuple):
    """The rules as lookup tables. A code is an index into `Physics.symbols`.

    Tables with K are indexed by a pair of codes, ``ahead * 8 + beyond``; tables with S, by the code of one cell.

    Attributes:
        ahead_K: New code of the cell ahead.
        beyond_K: New code of the cell beyond.
        moves_K: Whether the player moves.
        gain_K: Decrease of the number of cells that the player must still complete.
        left_S: New code of the cell on which the player was before the move. The index is the old code of the cell if
            the player stays, and 8 plus the old code if the player moves.
        is_fatal_S: Whether the game is lost when the player's cell has this code.
    """

    ahead_K: NDArray[np.uint8]
    beyond_K: NDArray[np.uint8]
    moves_K: NDArray[np.bool_]
    gain_K: NDArray[np.int16]
    left_S: NDArray[np.uint8]
    is_fatal_S: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Physics:
    """The rules of one game.

    Attributes:
        symbols: The symbols of the cells, at most 7; the code of a symbol is its index.
        players: Maps each symbol of a cell with the player to the symbol of this cell without the player.
        rule: Takes the symbols of the cell ahead and of the cell beyond (`EDGE` if off the board); returns their new
            symbols, or None if the player cannot move. It is never called with a player's symbol ahead.
        wanted: The game is won when no cell has this symbol.
        done: The symbol of a wanted cell after the player has completed it.
        fatal: The game is lost when the player's cell has this symbol; empty if the game cannot be lost.
        reach: 2 if a move can change the cell beyond, otherwise 1.
    """

    symbols: str
    players: Mapping[str, str]
    rule: Rule
    wanted: str
    done: str
    fatal: str = ""
    reach: int = 1
    _outcomes: dict[str, _MoveOutcome] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for ahead in self.symbols:
            for beyond in self.symbols + EDGE:
                after = None if ahead in self.players else self.rule(ahead, beyond)
                if after is not None:
                    gain = (ahead + beyond).count(self.wanted) - "".join(after).count(self.wanted)
                    changed = after[1] if after[1] != beyond else None
                    self._outcomes[ahead + beyond] = _MoveOutcome(after[0], changed, gain)

    def find_player(self, board: str) -> int:
        """Return the index of the player's cell; -1 if there is no player."""
        return max(board.find(player) for player in self.players)

    def encode(self, boards: str) -> NDArray[np.uint8]:
        """Return the codes of the cells of one or more boards, row by row."""
        codes = {ord(symbol): code for code, symbol in enumerate(self.symbols)}
        return np.frombuffer(boards.replace("\n", "").translate(codes).encode("latin-1"), np.uint8)

    def move(self, cells: list[str], here: int, step: int) -> int | None:
        """Move from the cell `here` by `step` characters: change `cells` in place.

        Return the number of cells that the move completed, negative if it undid one; None if the move was blocked.
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
        cells[here] = self.players[cells[here]]
        cells[at] = ahead
        if beyond is not None:
            cells[past] = beyond
        return gain

    def play(self, board: str, move: str) -> str:
        """Return the board after `move`. If the move is blocked, return the object `board` itself."""
        cells = list(board)
        gain = self.move(cells, self.find_player(board), steps_of(board.find("\n") + 1)[move])
        return board if gain is None else "".join(cells)

    def tables(self) -> Tables:
        """Return these rules as arrays."""
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
        for player, left in self.players.items():
            left_S[CODES + codes[player]] = codes[left]
        is_fatal_S = np.zeros(CODES, np.bool_)
        is_fatal_S[[codes[symbol] for symbol in self.fatal]] = True
        return Tables(ahead_K, beyond_K, moves_K, gain_K, left_S, is_fatal_S)
