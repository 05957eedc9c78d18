"""Slips: a random share of the moves goes to one side of the chosen direction.

Axes: N boards, R selected boards, K moves whose random numbers are drawn in advance.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..board import MOVES
from ..counter_rng import chance_B, chances_of_B

_AHEAD = 32
"""Number of moves whose random numbers are drawn together. Drawing for each move would double the time of a step."""

SIDES = {"up": ("right", "left"), "down": ("left", "right"), "left": ("up", "down"), "right": ("down", "up")}
"""For each move, the two directions of a slip. As in Gymnasium, low random numbers select the first direction."""


def slipped(move: str, slip: float, chance: float) -> str:
    """Return the direction in which the player goes after choosing `move`, given a random number `chance`.

    The result is the first of ``SIDES[move]`` for a `chance` below ``slip / 2``, the second from ``1 - slip / 2``.
    """
    if chance < slip / 2:
        return SIDES[move][0]
    return SIDES[move][1] if chance >= 1 - slip / 2 else move


class SlipNoise:
    """Lets moves on boards slip with the chance `slip`, by `slipped` with random numbers from each board's own seed."""

    def __init__(self, num_boards: int, slip: float) -> None:
        self._low, self._high = _bound(slip / 2), _bound(1 - slip / 2)
        self._first_N = np.zeros(num_boards, np.uint32)
        self._stride_N = np.zeros(num_boards, np.uint32)
        self._side_NK = np.zeros((num_boards, _AHEAD), np.int8)
        self._row_N = np.arange(num_boards) * _AHEAD
        # Offset per board: move number + offset = index of the move's random number in `_side_NK`.
        self._from_N = self._row_N.copy()
        self._turns_left = 0

    def seed(self, rows_R: NDArray[np.int64], spread_R: NDArray[np.uint64]) -> None:
        """Set new seeds for some boards. `spread_R` contains the result of `counter_rng.spread` for each seed."""
        self._first_N[rows_R], self._stride_N[rows_R] = chances_of_B(spread_R)
        self._turns_left = 0  # the numbers drawn in advance are of the old seeds

    def turn(self, action_N: NDArray[np.int64], moves_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the moves after slipping.

        `moves_N` are the moves on each board since its seed was set: at most one more than in the previous call.
        """
        if self._turns_left == 0:
            self._draw_ahead(moves_N)
        self._turns_left -= 1
        turn_N = action_N << _TWO
        turn_N += self._side_NK.take(moves_N + self._from_N)
        turned_N: NDArray[np.int64] = _TURNS.take(turn_N)
        return turned_N

    def _draw_ahead(self, moves_N: NDArray[np.int64]) -> None:
        count_NK = np.add.outer(moves_N.astype(np.uint32), np.arange(_AHEAD).astype(np.uint32))
        chance_NK = chance_B(self._first_N[:, None], self._stride_N[:, None], count_NK)
        np.add((chance_NK >= self._low).view(np.int8), (chance_NK >= self._high).view(np.int8), out=self._side_NK)
        np.subtract(self._row_N, moves_N, out=self._from_N)
        self._turns_left = _AHEAD


def _bound(share: float) -> NDArray[np.uint64] | NDArray[np.uint32]:
    """Return the bound for 32-bit random numbers, which are below it with chance `share` (at most 1)."""
    bound = math.ceil(share * 2**32)
    return np.array([bound], np.uint32) if bound < 2**32 else np.array([bound], np.uint64)


_TURNS = np.array(
    [[*(MOVES.index(to) for to in (SIDES[move][0], move, SIDES[move][1])), 0] for move in MOVES] + [[len(MOVES)] * 4]
).reshape(-1)  # The index is 4 * move, plus 0 for a slip to the first of `SIDES`, 1 for no slip, 2 for the second.
_TWO = np.array([2])
