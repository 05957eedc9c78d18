"""Searching rooms backwards: from every solution, pulling boxes, so that depth is the exact number of moves needed.

A state is one integer: the player's cell in its low byte, the set of the boxes' cells (a bit each) above it. Cells are
places in the room's text, so a room may have at most 255 characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from envkit.environments.board import MOVES

PLAYER = 255
"""Mask of the player's cell in a state."""


class Depths(NamedTuple):
    """How far states are from being solved.

    Attributes:
        moves: Moves on a shortest solution, by state, in the order of depth; states that are missing cannot be solved
            or lie deeper than `reached`.
        reached: Every state that needs at most so many moves is in `moves`.
        is_complete: Whether there is no deeper one.
    """

    moves: Mapping[int, int]
    reached: int
    is_complete: bool


def steps_of(width: int) -> dict[str, int]:
    """Return what each move adds to a cell in a text whose lines, with their ends, have `width` characters."""
    return dict(zip(MOVES, (-width, width, -1, 1), strict=True))


def search_back(floor: Iterable[int], targets: Iterable[int], *, width: int, max_depth: int, max_states: int) -> Depths:
    """Find the states that can be solved, nearest first.

    Args:
        floor: Cells without a wall, targets among them.
        targets: Cells that the boxes must come to.
        width: Characters of a line with its end.
        max_depth: Depth to stop at.
        max_states: No further layer is begun once so many states are known.
    """
    cells = list(floor)
    open_cells = frozenset(cells)
    backs = {
        cell: [(cell - step, cell + step) for step in steps_of(width).values() if cell - step in open_cells]
        for cell in cells
    }
    solved = sum(1 << target for target in targets)
    layer = [solved << 8 | cell for cell in cells if not solved >> cell & 1]
    moves = dict.fromkeys(layer, 0)
    depth = 0
    while layer and depth < max_depth and len(moves) < max_states:
        depth += 1
        following = []
        for state in layer:
            boxes = state >> 8
            player = state & PLAYER
            for back, ahead in backs[player]:
                if boxes >> back & 1:
                    continue
                before = boxes << 8 | back  # the player only walked
                if before not in moves:
                    moves[before] = depth
                    following.append(before)
                if boxes >> ahead & 1:  # or it pushed the box that is now ahead
                    before = (boxes ^ (1 << ahead | 1 << player)) << 8 | back
                    if before not in moves:
                        moves[before] = depth
                        following.append(before)
        layer = following
    return Depths(moves, depth, not layer)
