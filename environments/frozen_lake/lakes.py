"""Levels of the frozen lake: random maps with a path to the goal, Gymnasium's maps, or the caller's own map."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from envkit.errors import OptionError
from envkit.types import stable_hash

from ..split import Split, split_of

SYMBOLS = "_OGPX√"
"""Symbols of ice, hole, goal, player, player in a hole, player on the goal. The index of a symbol is its code in grids.
"""

MAPS = {
    "4x4": ("SFFF", "FHFH", "FFFH", "HFFG"),
    "8x8": ("SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF", "FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG"),
}
"""The maps of Gymnasium's FrozenLake-v1, by their names in Gymnasium."""

_DRAWS = 20_000
_CELLS = 2_000_000
"""Limits on the search for a lake: the number of maps drawn, and the number of cells in all of them together."""
_OURS = str.maketrans("SFHG", "P_OG")
_FREE = str.maketrans({"_": "1", "G": "1", "P": "1", "O": "0", "\n": "0"})


class Lake(NamedTuple):
    """A level: the map with the player on it, and the moves on a shortest path to the goal."""

    board: str
    shortest: int


@lru_cache(maxsize=4096)
def draw_lake(seed: int, size: int, frozen: float, move_limit: int, split: Split | None) -> Lake:
    """Return the lake of `seed`, the same in every process.

    Cells other than start and goal are ice with the chance `frozen`. The shortest path has at most `move_limit` moves.

    Raises:
        OptionError: The search reached its limit without finding such a lake.
    """
    rng = Random(stable_hash("FrozenLake", seed, size, frozen))
    chance = rng.random  # Use only `random()`: other methods may return other numbers in other Python versions.
    cells = size * size
    for _ in range(min(_DRAWS, _CELLS // cells)):
        start = int(chance() * cells)
        goal = (start + 1 + int(chance() * (cells - 1))) % cells
        tiles = ["_" if chance() < frozen else "O" for _ in range(cells)]
        tiles[start] = "P"
        tiles[goal] = "G"
        board = "\n".join(["".join(tiles[row : row + size]) for row in range(0, cells, size)])
        shortest = len(layers_of(board))
        if 0 < shortest <= move_limit and (split is None or split_of(board) == split):
            return Lake(board, shortest)
    raise OptionError(
        "size" if split is None else "split",
        f"found no lake with size={size}, frozen={frozen}, split={split} and a path of at most {move_limit} moves",
    )


@lru_cache(maxsize=64)
def read_map(rows: tuple[str, ...]) -> Lake:
    """Return the lake on the map `rows`, in Gymnasium's letters: S start, F frozen, H hole, G goal.

    Raises:
        OptionError: `rows` is not a square of 2 to 32 rows, has other letters, does not have exactly one S and one G,
            or has no path from S to G.
    """
    size = len(rows)
    if not 2 <= size <= 32 or any(len(row) != size for row in rows):
        raise OptionError("map", f"must be a square of 2 to 32 rows, got {size} rows of {[len(row) for row in rows]}")
    board = "\n".join(rows)
    odd = set(board) - set("SFHG\n")
    if odd:
        raise OptionError("map", f"must hold only S (start), F (frozen), H (hole) and G (goal), got {min(odd)!r}")
    if board.count("S") != 1 or board.count("G") != 1:
        raise OptionError("map", f"must have one S and one G, got {board.count('S')} and {board.count('G')}")
    board = board.translate(_OURS)
    shortest = len(layers_of(board))
    if not shortest:
        raise OptionError("map", "has no path from S to G")
    return Lake(board, shortest)


def layers_of(board: str) -> Sequence[int]:
    """Return the sets of cells at distance 0, 1, ... from the goal. The last set contains neighbours of the player.

    The result is empty if no path leads to the goal. A set of cells is an integer with one bit per character of the
    board; the lowest bit stands for the last character. Newlines never belong to a set, so a shift by one cell cannot
    wrap from one row to the next.
    """
    here, goal, width = board.find("P"), board.find("G"), board.find("\n") + 1
    if here < 0 or goal < 0:
        return []
    try:
        free = int(board.translate(_FREE), 2)
    except ValueError:  # an unknown symbol
        return []
    player = 1 << (len(board) - 1 - here)
    layer = 1 << (len(board) - 1 - goal)
    layers = []
    while layer:
        layers.append(layer)
        free &= ~layer
        layer = (layer << 1 | layer >> 1 | layer << width | layer >> width) & free
        if layer & player:
            return layers
    return []
