"""Levels: rooms with a start that is exactly as hard as was asked for.

Two numbers say how hard a level is: the moves of a shortest solution, and the fewest pushes among the solutions with so
few moves. Moves count first: a longer solution may have fewer pushes. A search backwards from every solution knows
both, so that every level can be solved.
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
"""Bounds on the search for a level: rooms tried, and states in them."""
_STATES_A_ROOM = 8_000
_ROOMS_A_CONCESSION = 5
"""Rooms that are tried before one more box may already be on a target."""
_ROOMS_A_CELL = 10
"""Rooms that are tried before they become a cell larger."""

_Start: TypeAlias = tuple[int, int, int]  # state, moves and pushes
_MemberT = TypeVar("_MemberT")


class Puzzle(NamedTuple):
    """A room to start in, and what its shortest solution takes.

    Attributes:
        board: The room at the start.
        moves: Moves of a shortest solution.
        pushes: Fewest pushes among the solutions with so many moves.
    """

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
    """Return the level of `seed`: the same in every process.

    With one box, every start in range is as likely as any other of its room. With more, the moves are drawn first, so
    that hard levels are about as frequent as easy ones where rooms allow, and searching ends at that depth.

    Args:
        seed: Any integer.
        size: Cells along one side, walls included, from 5.
        boxes: Number of boxes.
        moves: Fewest and most moves of a shortest solution.
        pushes: Fewest and most pushes, as `Puzzle` counts them; None takes any.
        split: Split that it must belong to; None takes any.

    Raises:
        OptionError: There is no place for the boxes, or no such level was found within a bounded search.
    """
    if 2 * boxes >= (size - 2) ** 2:
        raise OptionError("boxes", f"{boxes} boxes, their targets and a player do not fit into a room of size {size}")
    rng = Random(stable_hash("Sokoban", seed, size, boxes, *moves, *(pushes or ())))
    chance = rng.random  # the one method whose numbers Python promises to keep
    low, high = moves
    wanted = hoped = low if boxes == 1 else low + int(chance() * (high - low + 1))
    searched = 0
    for room_number in range(_ROOMS):
        floor = _carve(chance, size, _floor_cells(chance, size, boxes, hoped, room_number))
        room = PushGraph(floor, _take(chance, list(floor), boxes), size + 1)
        most_home = min(room_number // _ROOMS_A_CONCESSION, boxes - 1)
        for states, starts in _starts(room, (wanted, high), pushes or (0, high), most_home, together=boxes == 1):
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
    """Return how many cells of a room shall have no wall.

    With several boxes about as many as starts with so many moves usually need: the number of states grows with the
    power of the boxes.
    """
    inside = (size - 2) ** 2
    if boxes == 1:
        cells = min(int((0.5 + 0.35 * chance()) * inside), 60)
    else:
        cells = int(4 + boxes + 3 * (moves / boxes) ** 0.5 + (size - 2) * chance()) + room_number // _ROOMS_A_CELL
        cells = min(cells, int((0.6 + 0.3 * chance()) * inside))
    return max(cells, min(inside, 2 * boxes + 1))


def _carve(chance: Callable[[], float], size: int, count: int) -> list[int]:
    """Return `count` connected floor cells: those of a random walk, in the order in which it came by."""
    width = size + 1
    row = 1 + int(chance() * (size - 2))
    column = 1 + int(chance() * (size - 2))
    floor = {row * width + column: None}  # a dictionary keeps its order, a set does not
    while len(floor) < count:
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


def _take(chance: Callable[[], float], pool: list[_MemberT], count: int) -> list[_MemberT]:
    """Take `count` different members out of `pool`, which loses its order."""
    taken = []
    for _ in range(count):
        place = int(chance() * len(pool))
        taken.append(pool[place])
        pool[place] = pool[-1]
        pool.pop()
    return taken


def _starts(
    room: PushGraph, moves: tuple[int, int], pushes: tuple[int, int], most_home: int, *, together: bool
) -> Iterator[tuple[int, list[_Start]]]:
    """Search `room`; yield how many states that took, and the starts among them.

    Args:
        room: The room.
        moves: Fewest and most moves of a start.
        pushes: Fewest and most pushes.
        most_home: Most boxes that may already be on targets.
        together: Whether to yield all of them at once, or those with the same number of moves, fewest first.
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
                if least <= count <= most and (state & solved).bit_count() <= most_home
            ]
            if starts and not together:
                yield known - reported, starts
                reported = known
                starts = []
        if depth == high or known > _STATES_A_ROOM:
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
    """Return the refusal that names the last option without which there is a level."""
    wish = f"has {moves[0]} to {moves[1]} moves"
    option = "moves"
    if pushes is not None:
        wish += f" and {pushes[0]} to {pushes[1]} pushes"
    if split is not None:
        option = "split"
        wish += f", in the split {split!r}"
        draw_level(seed, size, boxes, moves, pushes)  # raises what is wrong without the split
    elif pushes is not None:
        option = "pushes"
        draw_level(seed, size, boxes, moves)
    rooms = f"{boxes} box{'es' * (boxes > 1)}"
    return OptionError(
        option,
        f"found no level of size {size} with {rooms} whose shortest solution {wish}; "
        "widen the range, or change size or boxes",
    )
