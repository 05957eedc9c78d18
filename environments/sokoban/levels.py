"""Random Sokoban levels of a requested difficulty.

Two numbers measure the difficulty of a level: the number of moves of a shortest solution, and the fewest pushes among
the shortest solutions. Longer solutions do not count, even if they need fewer pushes. A search backwards from every
solved state finds both numbers, so every level is solvable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from random import Random
from typing import NamedTuple, TypeAlias, TypeVar

from envkit.errors import OptionError
from envkit.types import stable_hash

from ..split import Split, split_of
from .search import PLAYER, SHIFT, PushGraph, search_back

_ROOMS = 4_000
_STATES = 600_000
"""Limits on the search for a level: the number of rooms to try, and the number of states in all rooms together."""
_STATES_PER_ROOM = 8_000
_ROOMS_PER_CONCESSION = 5
"""After every 5 rooms without a fitting level, one more box may start on a target."""
_ROOMS_PER_CELL = 10
"""After every 10 rooms without a fitting level, rooms with several boxes get one more floor cell."""

_Start: TypeAlias = tuple[int, int, int]  # state, moves and pushes
_ItemT = TypeVar("_ItemT")


class Puzzle(NamedTuple):
    """A level, the moves of a shortest solution, and the fewest pushes among the shortest solutions."""

    board: str
    moves: int
    pushes: int


@lru_cache(maxsize=4096)
def draw_level(
    seed: int,
    size: int,
    boxes: int,
    moves: tuple[int, int],
    pushes: tuple[int, int] | None = None,
    split: Split | None = None,
) -> Puzzle:
    """Return the level of `seed`, the same in every process.

    With one box, all starts in a room that fit the ranges are equally likely. With more boxes, the number of moves is
    drawn first, and a start with this number is preferred. Hard levels are thus about as frequent as easy ones.

    `size` counts the cells along one side, including the walls, and is at least 5. `moves` and `pushes` are the minimum
    and maximum of those of the `Puzzle`; None accepts any.

    Raises:
        OptionError: The boxes do not fit into the room, or the search reached its limits without finding a level.
    """
    if 2 * boxes >= (size - 2) ** 2:
        raise OptionError("boxes", f"{boxes} boxes, their targets and a player do not fit into size {size}; raise size")
    rng = Random(stable_hash("Sokoban", seed, size, boxes, *moves, *(pushes or ())))
    chance = rng.random  # Use only `random()`: other methods may return other numbers in other Python versions.
    low, high = moves
    wanted = first_wanted = low if boxes == 1 else low + int(chance() * (high - low + 1))
    searched = 0
    for room_number in range(_ROOMS):
        floor = _carve(chance, size, _floor_cells(chance, size, boxes, first_wanted, room_number))
        room = PushGraph(floor, _take(chance, list(floor), boxes), size + 1)
        most_done = min(room_number // _ROOMS_PER_CONCESSION, boxes - 1)
        for states, starts in _starts(room, (wanted, high), pushes or (0, high), most_done, together=boxes == 1):
            searched += states
            while starts:
                [(state, depth, count)] = _take(chance, starts, 1)
                board = _draw(room, size, state)
                if split is None or split_of(board) == split:
                    return Puzzle(board, depth, count)
        if searched > _STATES:
            break
        wanted = max(low, wanted - 1 - (wanted - low) // 8)
    raise _refusal(seed, size, boxes, moves, pushes, split)


def _floor_cells(chance: Callable[[], float], size: int, boxes: int, moves: int, room_number: int) -> int:
    """Return the number of floor cells for the next room to try.

    With several boxes, the result is about the number of cells that a solution of `moves` moves usually needs. A larger
    room would slow the search, since the number of states grows exponentially with the number of boxes.
    """
    inside = (size - 2) ** 2
    if boxes == 1:
        cells = min(int((0.5 + 0.35 * chance()) * inside), 60)
    else:
        cells = int(4 + boxes + 3 * (moves / boxes) ** 0.5 + (size - 2) * chance()) + room_number // _ROOMS_PER_CELL
        cells = min(cells, int((0.6 + 0.3 * chance()) * inside))
    return max(cells, min(inside, 2 * boxes + 1))


def _carve(chance: Callable[[], float], size: int, count: int) -> list[int]:
    """Return the first `count` cells that a random walk visits, in the order of their first visits."""
    width = size + 1
    row = 1 + int(chance() * (size - 2))
    column = 1 + int(chance() * (size - 2))
    floor = {row * width + column: None}  # a dictionary, since a set has no order
    while len(floor) < count:
        direction = int(chance() * 4)
        if direction == 0 and row > 1:
            row -= 1
        elif direction == 1 and row < size - 2:
            row += 1
        elif direction == 2 and column > 1:
            column -= 1
        elif direction == 3 and column < size - 2:
            column += 1
        floor[row * width + column] = None
    return list(floor)


def _take(chance: Callable[[], float], pool: list[_ItemT], count: int) -> list[_ItemT]:
    """Remove `count` random items from `pool` and return them; `pool` is reordered."""
    taken = []
    for _ in range(count):
        position = int(chance() * len(pool))
        taken.append(pool[position])
        pool[position] = pool[-1]
        pool.pop()
    return taken


def _starts(
    room: PushGraph, moves: tuple[int, int], pushes: tuple[int, int], most_done: int, *, together: bool
) -> Iterator[tuple[int, list[_Start]]]:
    """Search `room` for starts. Yield the number of states searched since the last yield, and the starts found.

    The starts have the given ranges of moves and pushes, and at most `most_done` boxes on a target. All are in one list
    if `together` is true; otherwise, there is a list per number of moves, the smallest number first.
    """
    (low, high), (least, most) = moves, pushes
    solved = room.solved
    known = reported = 0
    starts: list[_Start] = []
    for depth, layer in enumerate(search_back(room)):
        known += len(layer)
        if depth >= low:
            starts += [
                (state, depth, count)
                for state, count in layer.items()
                if least <= count <= most and (state & solved).bit_count() <= most_done
            ]
            if starts and not together:
                yield known - reported, starts
                reported = known
                starts = []
        if depth == high or known > _STATES_PER_ROOM:
            break
    yield known - reported, starts


def _draw(room: PushGraph, size: int, state: int) -> str:
    cells = list("\n".join(["#" * size] * size))
    for place, cell in enumerate(room.cells):
        box = 1 << SHIFT + place
        if state & box:
            cells[cell] = "√" if room.solved & box else "X"
        else:
            cells[cell] = "O" if room.solved & box else "_"
    player = room.cells[state & PLAYER]
    cells[player] = "P" if cells[player] == "_" else "S"
    return "".join(cells)


def _refusal(
    seed: int, size: int, boxes: int, moves: tuple[int, int], pushes: tuple[int, int] | None, split: Split | None
) -> OptionError:
    """Return the error for a failed search. The error names the option at fault: `moves`, `pushes` or `split`."""
    request = f"has {moves[0]} to {moves[1]} moves"
    option = "moves"
    if pushes is not None:
        request += f" and {pushes[0]} to {pushes[1]} pushes"
    if split is not None:
        option = "split"
        request += f", in the split {split!r}"
        draw_level(seed, size, boxes, moves, pushes)  # Raises an error if there is no level even without the split.
    elif pushes is not None:
        option = "pushes"
        draw_level(seed, size, boxes, moves)
    rooms = f"{boxes} box{'es' * (boxes > 1)}"
    return OptionError(
        option,
        f"found no level of size {size} with {rooms} whose shortest solution {request}; "
        "widen the range, or change size or boxes",
    )
