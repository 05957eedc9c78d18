"""The expert player of the frozen lake. On slippery ice, it plans by value iteration (Bellman, 1957).

The player does not see how many moves are left. The plan therefore assumes that the episode ends after each move with
chance 1 / (2 * move limit). Without this assumption, a player would wait in safe places until the moves run out. Of the
factors that were tried, 2 comes closest to the best play of a player who knows the number of moves left.

Axes: A moves in the order of `MOVES`, S cells row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from envkit.types import JSON, Observation

from ..board import MOVES, find_board
from ..boards.batch import neighbours
from ..boards.slip_noise import SIDES
from .game import LakeOptions
from .lakes import SYMBOLS, layers_of

_CHANGE = 1e-12
_SAME = 1e-9
"""Relative tolerances. Planning ends when no value grows by more than `_CHANGE`. Values that differ by less than
`_SAME` count as equal. Absolute tolerances would fail, since values shrink with every step of a long narrow path.
"""


class FrozenLakeExpert:
    """Walks a shortest path on the observed lake. On slippery ice, the expert follows a plan that allows for slips.

    All arguments are options of the environment; see `LakeOptions`. The plan needs the move limit, which depends on
    `size`, `map` and `max_moves`. `options` have no effect on the expert.

    Raises:
        OptionError: An option is invalid.
    """

    def __init__(
        self,
        *,
        symbols: str | None = None,
        spaced: bool = False,
        slip: float = 0.0,
        size: int | None = None,
        map: str | Sequence[str] | None = None,
        max_moves: int | None = None,
        **options: JSON,
    ) -> None:
        chosen = LakeOptions(symbols=symbols, spaced=spaced, slip=slip, size=size, map=map, max_moves=max_moves)
        # Maps the shown symbols to the game's own. A game symbol that is not among the shown ones becomes "?".
        self._to_ours = None if symbols is None else str.maketrans(SYMBOLS + symbols, "?" * len(SYMBOLS) + SYMBOLS)
        self._spaced = spaced
        self._slip = slip
        self._move_limit = chosen.move_limit

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return the first moves of all shortest paths; on slippery ice, the moves that `best_moves` returns.

        The result is empty if the episode has ended or no path leads to the goal.
        """
        board = self._read(observation)
        layers = layers_of(board)
        if not layers:
            return ()
        if self._slip:
            plan = best_moves(board.replace("P", "_"), self._slip, self._move_limit)
            return plan[board.replace("\n", "").find("P")]
        width = board.find("\n") + 1
        here = 1 << (len(board) - 1 - board.find("P"))
        around = (here << width, here >> width, here << 1, here >> 1)
        return [move for move, cell in zip(MOVES, around, strict=True) if cell & layers[-1]]

    def is_hazardous(self, observation: Observation) -> bool:
        """Return whether a move that brings the player nearer to the goal's row or column ends in a hole."""
        board = self._read(observation)
        here, goal, width = board.find("P"), board.find("G"), board.find("\n") + 1
        if here < 0 or goal < 0:
            return False
        down = goal // width - here // width
        right = goal % width - here % width
        return (down != 0 and board[here + (width if down > 0 else -width)] == "O") or (
            right != 0 and board[here + (1 if right > 0 else -1)] == "O"
        )

    def answer(self, move: str) -> str:
        return f"<answer>{move}</answer>"

    def _read(self, observation: Observation) -> str:
        board = find_board(observation.text, spaced=self._spaced)
        return board if self._to_ours is None else board.translate(self._to_ours)


@lru_cache(maxsize=256)
def best_moves(board: str, slip: float, move_limit: int) -> Sequence[Sequence[str]]:
    """Return all best moves for each cell, row by row.

    A cell has no moves if it is a hole or the goal, or if no path leads from it to the goal. The position of the player
    does not matter.
    """
    cells = board.replace("\n", "")
    is_ice_S = np.array([symbol in "_P" for symbol in cells])
    goal_S = np.array([float(symbol == "G") for symbol in cells])
    ahead_AS = neighbours(board.find("\n"))[0][:, : len(MOVES)].T
    chance_AA = np.eye(len(MOVES)) * (1 - slip)  # [i, j] is the chance of move j if move i is chosen
    for move, sides in SIDES.items():
        chance_AA[MOVES.index(move), [MOVES.index(side) for side in sides]] = slip / 2
    chance_AA *= 1 - 0.5 / move_limit
    value_S = goal_S
    while True:
        value_AS = chance_AA @ value_S[ahead_AS]
        last_S, value_S = value_S, np.where(is_ice_S, value_AS.max(axis=0), goal_S)
        if (value_S - last_S <= _CHANGE * value_S).all():
            break
    is_best_AS = (value_AS >= (1 - _SAME) * value_S) & (value_AS > 0) & is_ice_S
    return [[move for move, is_best in zip(MOVES, column, strict=True) if is_best] for column in is_best_AS.T.tolist()]
