"""Levels: rooms with a start whose shortest solution has a wanted length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from envkit.environments.sokoban.search import PLAYER, Depths, search_back
from envkit.environments.split import Split, split_of
from envkit.errors import OptionError
from envkit.types import stable_hash

_ROOMS = 2_000
_ROOMS_A_CONCESSION = 5
"""Rooms that are tried before one more box may already be on a target."""
_STATES_A_ROOM = 20_000
_STATES = 400_000


class Level(NamedTuple):
    """A level.

    Attributes:
        board: The room at the start.
        shortest: Moves on a shortest solution.
    """

    board: str
    shortest: int


@lru_cache(maxsize=4096)
def draw_level(seed: int, size: int, boxes: int, low: int, high: int, split: Split | None = None) -> Level:
    """Return the level of `seed`: the same in every process.

    Args:
        seed: Any integer.
        size: Cells along one side, walls included, 5 to 15.
        boxes: Number of boxes.
        low: Fewest moves of its shortest solution.
        high: Most moves of its shortest solution.
        split: Split that it must belong to; None takes any.

    Raises:
        OptionError: No such level was found within a bounded search.
    """
    rng = Random(stable_hash("Sokoban", seed, size, boxes, low, high))
    chance = rng.random  # the one method whose numbers Python promises to keep
    searched = 0
    for room in range(_ROOMS):
        floor = _carve(chance, size, boxes)
        targets = _take(chance, list(floor), boxes)
        depths = search_back(floor, targets, width=size + 1, max_depth=high, max_states=_STATES_A_ROOM)
        starts = _starts(depths, targets, low, most_home=min(room // _ROOMS_A_CONCESSION, boxes - 1))
        while starts:
            [state] = _take(chance, starts, 1)
            board = _draw(size, floor, targets, state)
            if split is None or split_of(board) == split:
                return Level(board, depths.moves[state])
        searched += len(depths.moves)
        if searched > _STATES:
            break
    raise OptionError(
        "boxes" if split is None else "split",
        f"found no room with size={size}, boxes={boxes}, split={split} whose shortest solution has {low} to {high} "
        "moves; change size, boxes, min_solution or max_solution",
    )


def _carve(chance: Callable[[], float], size: int, boxes: int) -> Sequence[int]:
    """Return connected floor cells: a random walk over a share of the inside, in the order in which it came by.

    The more boxes, the fewer cells, since the number of states grows with the power of the boxes.
    """
    width = size + 1
    inside = (size - 2) ** 2
    wanted = min(int((0.5 + 0.35 * chance()) * inside), 12 + 60 // boxes)
    wanted = max(wanted, min(inside, 2 * boxes + 1))
    row = 1 + int(chance() * (size - 2))
    column = 1 + int(chance() * (size - 2))
    floor = {row * width + column: None}  # a dictionary keeps its order, a set does not
    while len(floor) < wanted:
        way = int(chance() * 4)
        if way == 0 and row > 1:
            row -= 1
        elif way == 1 and row < size - 2:
            row += 1
        elif way == 2 and column > 1:
            column -= 1
        elif way == 3 and column < size - 2:
            column += 1
        floor[row * width + column] = None
    return list(floor)


def _take(chance: Callable[[], float], pool: list[int], count: int) -> list[int]:
    """Take `count` different members out of `pool`, which loses its order."""
    taken = []
    for _ in range(count):
        place = int(chance() * len(pool))
        taken.append(pool[place])
        pool[place] = pool[-1]
        pool.pop()
    return taken


def _starts(depths: Depths, targets: Sequence[int], low: int, *, most_home: int) -> list[int]:
    """Return the states that need at least `low` moves and have at most `most_home` boxes on targets."""
    home = sum(1 << target for target in targets)
    return [
        state for state, depth in depths.moves.items() if depth >= low and (state >> 8 & home).bit_count() <= most_home
    ]


def _draw(size: int, floor: Sequence[int], targets: Sequence[int], state: int) -> str:
    cells = list("\n".join(["#" * size] * size))
    for cell in floor:
        cells[cell] = "X" if state >> 8 >> cell & 1 else "_"
    for cell in targets:
        cells[cell] = "√" if cells[cell] == "X" else "O"
    player = state & PLAYER
    cells[player] = "P" if cells[player] == "_" else "S"
    return "".join(cells)
