"""The best moves on slippery ice, by policy iteration (Howard, "Dynamic Programming and Markov Processes", 1960)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from envkit.environments.board import MOVES
from envkit.environments.boards.terms import SIDES

DISCOUNT = 0.999
"""Worth of the goal a move later, so that of ways that are equally safe the shortest is best."""

_SAME = 1e-9


@lru_cache(maxsize=256)
def best_moves(board: str, slip: float) -> Sequence[Sequence[str]]:
    """Return, for each cell row by row, every move with the best chance of the goal; none in holes and on the goal.

    Args:
        board: A lake in its own symbols; where the player stands changes nothing.
        slip: Chance in [0, 1] that a move goes to one of its two sides instead.
    """
    ice_S = np.array([symbol in "_P" for symbol in board.replace("\n", "")])
    goal_S = np.array([symbol == "G" for symbol in board.replace("\n", "")])
    cells = np.arange(len(ice_S))
    ahead_AS = _ahead(board.find("\n"))
    chance_ASS = np.zeros((len(MOVES), len(cells), len(cells)))
    for number, move in enumerate(MOVES):
        for way, chance in ((move, 1 - slip), *((side, slip / 2) for side in SIDES[move])):
            np.add.at(chance_ASS[number], (cells, ahead_AS[MOVES.index(way)]), chance)
    chance_ASS *= ice_S[:, None]
    won_AS = chance_ASS @ goal_S
    chosen_S = np.zeros(len(cells), np.int64)
    while True:
        value_S = np.linalg.solve(np.eye(len(cells)) - DISCOUNT * chance_ASS[chosen_S, cells], won_AS[chosen_S, cells])
        worth_AS = won_AS + DISCOUNT * (chance_ASS @ value_S)
        is_worse_S = worth_AS[chosen_S, cells] < worth_AS.max(axis=0) - _SAME
        if not is_worse_S.any():
            break
        chosen_S = np.where(is_worse_S, worth_AS.argmax(axis=0), chosen_S)
    is_best_AS = (worth_AS > worth_AS.max(axis=0) - _SAME) & (worth_AS > _SAME) & ice_S
    return [[move for move, is_best_S in zip(MOVES, is_best_AS, strict=True) if is_best_S[cell]] for cell in cells]


def _ahead(side: int) -> NDArray[np.int64]:
    """Return the cell that each move leads to from each cell [4, S]; the edge stops."""
    row_S, column_S = np.divmod(np.arange(side * side), side)
    step = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    return np.array(
        [
            np.clip(row_S + down, 0, side - 1) * side + np.clip(column_S + right, 0, side - 1)
            for down, right in (step[move] for move in MOVES)
        ]
    )
