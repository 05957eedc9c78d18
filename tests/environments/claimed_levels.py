"""Drawn levels against their claims: the solver's plan has exactly the moves and pushes of the level."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from envkit.environments.sokoban import play
from envkit.environments.sokoban.levels import draw_level
from envkit.environments.sokoban.solver import solve
from tests.environments.sokoban.slow_sokoban import Cost


class Kind(NamedTuple):
    """A kind of levels: cells per side, boxes, and ranges of moves and pushes."""

    size: int
    boxes: int
    moves: tuple[int, int]
    pushes: tuple[int, int] | None

    def __str__(self) -> str:
        pushes = "" if self.pushes is None else f", {self.pushes[0]} to {self.pushes[1]} pushes"
        return f"{self.size}x{self.size}, boxes: {self.boxes}, {self.moves[0]} to {self.moves[1]} moves{pushes}"


KINDS = {
    Kind(6, 1, (2, 10), None): 2500,
    Kind(6, 1, (1, 3), None): 500,
    Kind(6, 1, (5, 10), (2, 4)): 500,
    Kind(6, 2, (2, 20), None): 2000,
    Kind(6, 2, (8, 12), (3, 5)): 500,
    Kind(8, 2, (2, 26), None): 2000,
    Kind(8, 2, (5, 10), None): 1000,
    Kind(8, 2, (10, 20), None): 500,
    Kind(8, 2, (20, 26), (5, 9)): 500,
}
"""The kinds, each with the number of levels of which ten thousand are made."""


def broken_claims(kind: Kind, levels: int) -> list[int]:
    """Return the seeds of wrong levels among the first `levels`."""
    return [seed for seed in range(levels) if not _holds(kind, seed)]


def _holds(kind: Kind, seed: int) -> bool:
    level = draw_level(seed, kind.size, kind.boxes, kind.moves, kind.pushes)
    is_in_range = kind.moves[0] <= level.moves <= kind.moves[1]
    if kind.pushes is not None:
        is_in_range = is_in_range and kind.pushes[0] <= level.pushes <= kind.pushes[1]
    return is_in_range and cost_of(level.board, solve(level.board)) == (level.moves, level.pushes)


def cost_of(board: str, plan: tuple[str, ...] | None) -> Cost:
    """Check that `plan` solves `board`; return its numbers of moves and of pushes."""
    assert plan is not None
    boards = [board]
    for move in plan:
        boards.append(play(boards[-1], move))
    assert "X" not in boards[-1]
    assert "X" in "".join(boards[-2:-1]) or not plan
    assert all(before != after for before, after in pairwise(boards))
    return len(plan), sum(_boxes(before) != _boxes(after) for before, after in pairwise(boards))


def _boxes(board: str) -> list[int]:
    return [cell for cell, symbol in enumerate(board) if symbol in "X√"]
