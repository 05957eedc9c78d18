"""Many boards of one game as arrays. Axes: N boards, R selected boards, S cells of a board, K pairs (see `Tables`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .level_cache import Drawn
from .physics import CODES, Physics

# NumPy is faster with a one-element array than with a scalar.
_CODES_1 = np.array([CODES], np.uint8)
_WAYS_1 = np.array([3])  # the table index is ``cell << 3 | action``


class PlayedMoves(NamedTuple):
    """The effects of one move per board.

    Attributes:
        moved_N: Whether the board changed.
        gain_N: Decrease of the number of cells that the player must still complete.
        won_N: Whether the player has completed all such cells.
        over_N: Whether the game is won or lost.
    """

    moved_N: NDArray[np.bool_]
    gain_N: NDArray[np.int16]
    won_N: NDArray[np.bool_]
    over_N: NDArray[np.bool_]


class BoardBatch(ABC):
    """N boards of a game; one call plays a move on each board.

    Attributes:
        side: Cells along one side of a board.
        here_N: Index of the player's cell on each board.
        left_N: Number of cells on each board that the player must still complete.
    """

    def __init__(self, physics: Physics, num_boards: int, side: int) -> None:
        self.side = side
        self.here_N = np.zeros(num_boards, np.int64)
        self.left_N = np.ones(num_boards, np.int16)
        self._cells_NS = np.zeros((num_boards, side * side), np.uint8)
        self._base_N = np.arange(num_boards) * (side * side)
        self._tables = physics.tables()
        self._page = np.full((num_boards, side, side + 1), len(physics.symbols), np.uint8)  # the last code ends a line

    @abstractmethod
    def play(self, action_N: NDArray[np.int64]) -> PlayedMoves:
        """Play one action on every board; `STAY` does nothing."""

    def place(self, rows_R: NDArray[np.int64], levels: Drawn) -> None:
        """Put new levels on the boards `rows_R`: one level per board, or a single level for all of them."""
        self._cells_NS[rows_R] = levels.cells_RS
        self.here_N[rows_R] = levels.here_R
        self.left_N[rows_R] = levels.wanted_R

    def codes(self, rows_R: NDArray[np.int64] | None = None) -> NDArray[np.uint8]:
        """Return a copy of the cell codes of the boards `rows_R` [R, S]. None means all boards."""
        return self._cells_NS.copy() if rows_R is None else self._cells_NS[rows_R]

    def grids(self, rows_R: NDArray[np.int64] | None = None) -> NDArray[np.uint8]:
        """Return a copy of the cell codes of the boards `rows_R` [R, side, side]. None means all boards."""
        return self.codes(rows_R).reshape(-1, self.side, self.side)

    def texts(self, symbols: str, rows_R: NDArray[np.int64] | None = None) -> list[str]:
        """Return the boards `rows_R` as text. None means all boards. A cell with code c is shown as ``symbols[c]``."""
        cells_RS, side = self.codes(rows_R), self.side
        page = self._page[: len(cells_RS)]
        page[:, :, :side] = cells_RS.reshape(-1, side, side)
        shown = bytearray(range(256))
        for code, symbol in enumerate(f"{symbols}\n"):
            shown[code] = ord(symbol) if symbol.isascii() else code
        text = page.tobytes().translate(bytes(shown)).decode("latin-1")
        for code, symbol in enumerate(symbols):
            if not symbol.isascii():
                text = text.replace(chr(code), symbol)
        length = side * (side + 1)
        return [text[start : start + length - 1] for start in range(0, len(text), length)]


class Pushing(BoardBatch):
    """Boards on which a move can change the cell ahead of the player and the cell beyond that."""

    def __init__(self, physics: Physics, num_boards: int, side: int) -> None:
        super().__init__(physics, num_boards, side)
        self._ahead, self._beyond = neighbours(side)
        self._is_deadly = bool(physics.fatal)

    def play(self, action_N: NDArray[np.int64]) -> PlayedMoves:
        tables, cells = self._tables, self._cells_NS.reshape(-1)
        way_N = self.here_N << _WAYS_1
        way_N += action_N
        ahead_N = self._ahead.take(way_N)
        here_N = self.here_N + self._base_N
        at_N = ahead_N + self._base_N
        past_N = self._beyond.take(way_N)
        past_N += self._base_N
        key_N = cells.take(at_N)
        key_N *= _CODES_1
        key_N += cells.take(past_N)
        key_N = key_N.astype(np.int64)
        moved_N = tables.moves_K.take(key_N)
        left_N = moved_N.view(np.uint8) * _CODES_1
        left_N += cells.take(here_N)
        arrived_N = tables.ahead_K.take(key_N)
        # On boards without a valid move, these assignments write the old values again.
        cells[here_N] = tables.left_S.take(left_N)
        cells[at_N] = arrived_N
        cells[past_N] = tables.beyond_K.take(key_N)
        gain_N = tables.gain_K.take(key_N)
        np.copyto(self.here_N, ahead_N, where=moved_N)
        self.left_N -= gain_N
        won_N = self.left_N == 0
        over_N = won_N | tables.is_fatal_S.take(arrived_N) if self._is_deadly else won_N.copy()
        return PlayedMoves(moved_N, gain_N, won_N, over_N)


class Walking(BoardBatch):
    """Boards on which a move changes only the player's position.

    Only the edge of the board blocks a move. The player wins by reaching a cell with the symbol `Physics.wanted`. The
    array of cells does not contain the player.
    """

    def __init__(self, physics: Physics, num_boards: int, side: int) -> None:
        super().__init__(physics, num_boards, side)
        self._ahead, _ = neighbours(side)
        tables = self._tables
        self._under_S = tables.left_S[-CODES:]
        # For each cell code: the code of the cell after the player has entered it.
        self._arrived_S = tables.ahead_K[CODES - 1 :: CODES].copy()
        self._wins_S = tables.gain_K[CODES - 1 :: CODES] > 0
        self._ends_S = self._wins_S | tables.is_fatal_S[self._arrived_S]
        self._shown_N = np.zeros(num_boards, np.uint8)
        self._map: _Map | None = None  # Set only while all boards have the same level.

    def place(self, rows_R: NDArray[np.int64], levels: Drawn) -> None:
        if self._map is not None and levels is self._map.level:
            self.here_N[rows_R] = levels.here_R[0]
            self.left_N[rows_R] = 1
            return
        if self._map is not None:
            self._shown_N = self._map.codes_SS[self.here_N, self.here_N]
            self._map = None
        super().place(rows_R, levels)
        at_R = self._base_N[rows_R] + levels.here_R
        cells = self._cells_NS.reshape(-1)
        self._shown_N[rows_R] = shown_R = cells[at_R]
        cells[at_R] = self._under_S[shown_R]
        if len(levels.cells_RS) == 1 and len(rows_R) == len(self.here_N):
            self._map = self._map_of(levels)

    def play(self, action_N: NDArray[np.int64]) -> PlayedMoves:
        way_N = self.here_N << _WAYS_1
        way_N += action_N
        ahead_N = self._ahead.take(way_N)
        moved_N = ahead_N != self.here_N
        self.here_N = ahead_N
        if self._map is not None:
            won_N, over_N = self._map.wins_S.take(ahead_N), self._map.ends_S.take(ahead_N)
        else:
            found_N = self._cells_NS.take(ahead_N + self._base_N).astype(np.int64)
            self._shown_N = self._arrived_S.take(found_N)
            won_N, over_N = self._wins_S.take(found_N), self._ends_S.take(found_N)
        self.left_N = (~won_N).astype(np.int16)
        return PlayedMoves(moved_N, won_N.astype(np.int16), won_N, over_N)

    def codes(self, rows_R: NDArray[np.int64] | None = None) -> NDArray[np.uint8]:
        if self._map is not None:
            return self._map.codes_SS.take(self.here_N if rows_R is None else self.here_N[rows_R], axis=0)
        codes_RS = super().codes(rows_R)
        if rows_R is None:
            codes_RS.reshape(-1)[self.here_N + self._base_N] = self._shown_N
        else:
            codes_RS[np.arange(len(rows_R)), self.here_N[rows_R]] = self._shown_N[rows_R]
        return codes_RS

    def _map_of(self, level: Drawn) -> _Map:
        cells_S = self._cells_NS[0]
        codes_SS = np.repeat(cells_S[None], len(cells_S), axis=0)
        np.fill_diagonal(codes_SS, self._arrived_S[cells_S])
        return _Map(level, self._wins_S[cells_S], self._ends_S[cells_S], codes_SS)


class _Map(NamedTuple):
    """Lookup tables for a level that all boards share. The index of each table is the player's cell."""

    level: Drawn
    wins_S: NDArray[np.bool_]
    ends_S: NDArray[np.bool_]
    codes_SS: NDArray[np.uint8]


def batch_of(physics: Physics, num_boards: int, side: int) -> BoardBatch:
    """Return `num_boards` boards with `side` cells along one side and the rules of `physics`."""
    return (Pushing if physics.reach == 2 else Walking)(physics, num_boards, side)


def neighbours(side: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return tables [S, 8] of the cell ahead and of the cell beyond, by cell and action.

    If the cell ahead is off the board, the table contains the player's cell. If the cell beyond is off the board, the
    table contains the cell ahead, which is a wall in every game that reads the cell beyond.
    """
    row_S1, column_S1 = (part_S[:, None] for part_S in np.divmod(np.arange(side * side), side))
    down = np.array([-1, 1, 0, 0, 0, 0, 0, 0])
    right = np.array([0, 0, -1, 1, 0, 0, 0, 0])
    ahead, beyond = (
        np.clip(row_S1 + steps * down, 0, side - 1) * side + np.clip(column_S1 + steps * right, 0, side - 1)
        for steps in (1, 2)
    )
    return ahead, beyond
