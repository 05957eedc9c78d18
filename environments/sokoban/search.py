"""Searching rooms: backwards from every solution by pulling boxes, and ahead from a state by pushing them.

Both searches go layer by layer, so that the number of a layer is the exact number of moves between it and where the
search began. With every state they keep the fewest pushes among the ways that have that fewest number of moves: moves
count first, pushes second.

Floor cells are numbered, and their numbers are called places. A state is one integer: the player's place in its lowest
bits, above it a bit for each place with a box.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

from ..board import MOVES
from .rules import SYMBOLS

SHIFT = 10
PLAYER = (1 << SHIFT) - 1
"""Mask of the player's place in a state."""

Layer: TypeAlias = dict[int, int]
"""Fewest pushes to the beginning of the search, by state. All states are equally many moves away from it."""

_BLOCKED = -1  # as a set of boxes: some box always stands there
_EMPTY = str.maketrans({"P": "_", "X": "_", "S": "O", "√": "O"})
_KNOWN = frozenset(SYMBOLS + "\n")
_Table: TypeAlias = list[list[tuple[int, int, int, int]]]


class PushGraph:
    """The walls and targets of a room, and what can be done on each of its places.

    Args:
        cells: Cells without a wall, at most 1024, in the order of their places.
        targets: Those of them that the boxes must come to.
        width: Characters of a line of the room's text with its end.
    """

    def __init__(self, cells: Sequence[int], targets: Sequence[int], width: int) -> None:
        self.cells = cells
        self.width = width
        self.places = {cell: place for place, cell in enumerate(cells)}
        self.solved = sum([1 << SHIFT + self.places[target] for target in targets])

    @cached_property
    def back(self) -> _Table:
        """By the player's place, a row for each move that may have led there.

        Box that would block where the player came from; what undoing a walk adds to the state; box that may have been
        pushed; what pulling that back adds.
        """
        places, width = self.places, self.width
        table: _Table = []
        for cell, here in places.items():
            rows = []
            for step in (-width, width, -1, 1):
                before = places.get(cell - step)
                if before is None:
                    continue
                ahead = places.get(cell + step)
                walk = before - here
                if ahead is None:
                    rows.append((1 << SHIFT + before, walk, 0, 0))
                else:
                    box = 1 << SHIFT + ahead
                    rows.append((1 << SHIFT + before, walk, box, walk + (1 << SHIFT + here) - box))
            table.append(rows)
        return table

    @cached_property
    def ahead(self) -> _Table:
        """By the player's place, a row for each move.

        Box that would have to be pushed; what walking adds to the state; boxes that would stop the push; what pushing
        adds.
        """
        return self._table_ahead(self.places)

    @cached_property
    def ahead_alive(self) -> _Table:
        """`ahead` without the pushes onto dead places."""
        return self._table_ahead(self.alive)

    @cached_property
    def dead(self) -> int:
        """The dead places, as a set of boxes."""
        return sum([1 << SHIFT + place for cell, place in self.places.items() if cell not in self.alive])

    @cached_property
    def alive(self) -> frozenset[int]:
        """Cells from which a box can be brought to some target; on the others it is lost."""
        found = [cell for cell, place in self.places.items() if self.solved >> SHIFT + place & 1]
        alive = set(found)
        for cell in found:  # which grows
            for step in (-self.width, self.width, -1, 1):
                before = cell + step
                if before not in alive and before in self.places and before + step in self.places:
                    alive.add(before)
                    found.append(before)
        return frozenset(alive)

    def before(self, state: int) -> Layer:
        """Return the states from which one move leads to `state`, and 1 for those where it pushes, otherwise 0."""
        return _layer_before(self.back, {state: 0}, ())

    def after(self, state: int) -> Layer:
        """Return the states to which one move leads, in the order of `MOVES`, and 1 for a push, otherwise 0."""
        return _layer_after(self.ahead, {state: 0}, ())

    def move_between(self, state: int, after: int) -> str:
        """Return the move that leads from `state` to `after`."""
        step = self.cells[after & PLAYER] - self.cells[state & PLAYER]
        return MOVES[(-self.width, self.width, -1, 1).index(step)]

    def _table_ahead(self, free: Container[int]) -> _Table:
        places, width = self.places, self.width
        table: _Table = []
        for cell, here in places.items():
            rows = []
            for step in (-width, width, -1, 1):
                ahead = places.get(cell + step)
                if ahead is None:
                    continue
                walk, box = ahead - here, 1 << SHIFT + ahead
                if cell + 2 * step in places and cell + 2 * step in free:
                    beyond = 1 << SHIFT + places[cell + 2 * step]
                    rows.append((box, walk, beyond, walk - box + beyond))
                else:
                    rows.append((box, walk, _BLOCKED, 0))
            table.append(rows)
        return table


class Position(NamedTuple):
    """What a board shows.

    Attributes:
        room: The room.
        state: Where player and boxes are.
    """

    room: PushGraph
    state: int


def read_position(board: str) -> Position | None:
    """Return what `board` shows; None when that is no room to play in.

    A room is a rectangle of the symbols, walled all around, with one player, a box and as many targets as boxes.
    """
    size = board.find("\n")
    rows = (len(board) + 1) // (size + 1) if size > 0 else 0
    ends = "\n" * (rows - 1)
    if len(board) != rows * (size + 1) - 1 or board[size :: size + 1] != ends or board.count("\n") != len(ends):
        return None
    empty = board.translate(_EMPTY)
    edge = empty[:size] + empty[-size:] + empty[:: size + 1] + empty[size - 1 :: size + 1]
    if edge.strip("#") or not _KNOWN.issuperset(board) or board.count("P") + board.count("S") != 1:
        return None
    boxes = [cell for cell, symbol in enumerate(board) if symbol in "X√"]
    if not boxes or len(boxes) != empty.count("O") or empty.count("_") + len(boxes) > PLAYER:
        return None
    room = graph_of(empty)
    player = max(board.find("P"), board.find("S"))
    return Position(room, sum([1 << SHIFT + room.places[box] for box in boxes]) | room.places[player])


@lru_cache(maxsize=512)
def graph_of(text: str) -> PushGraph:
    """Return the room that `text` shows: one without player and boxes."""
    cells = [cell for cell, symbol in enumerate(text) if symbol in "_O"]
    return PushGraph(cells, [cell for cell in cells if text[cell] == "O"], text.find("\n") + 1)


def search_back(room: PushGraph) -> Iterator[Layer]:
    """Yield the states that need 0, 1, 2... moves to a solution, with their fewest pushes, until there are no more."""
    table, solved = room.back, room.solved
    layer = {solved | place: 0 for place in range(len(table)) if not solved >> SHIFT + place & 1}
    seen = set(layer)
    while layer:
        yield layer
        layer = _layer_before(table, layer, seen)
        seen.update(layer)


def search_ahead(room: PushGraph, state: int) -> Iterator[Layer]:
    """Yield the states that are 0, 1, 2... moves away from `state`, with their fewest pushes, until there are no more.

    States with a box on a dead place that was not there before are left out: none of them can be solved.
    """
    table = room.ahead_alive
    layer = {state: 0}
    seen = set(layer)
    while layer:
        yield layer
        layer = _layer_after(table, layer, seen)
        seen.update(layer)


def _layer_before(table: _Table, layer: Layer, seen: Container[int]) -> Layer:
    found: Layer = {}
    get = found.get
    for state, pushes in layer.items():
        for behind, walk, box, pull in table[state & PLAYER]:
            if state & behind:
                continue
            before = state + walk  # the player only walked
            if before not in seen and get(before, pushes + 1) > pushes:
                found[before] = pushes
            if state & box:  # or it pushed the box that is now ahead
                before = state + pull
                if before not in seen and get(before, pushes + 2) > pushes + 1:
                    found[before] = pushes + 1
    return found


def _layer_after(table: _Table, layer: Layer, seen: Container[int]) -> Layer:
    found: Layer = {}
    get = found.get
    for state, pushes in layer.items():
        for box, walk, beyond, push in table[state & PLAYER]:
            if not state & box:
                after = state + walk
                if after not in seen and get(after, pushes + 1) > pushes:
                    found[after] = pushes
            elif not state & beyond:
                after = state + push
                if after not in seen and get(after, pushes + 2) > pushes + 1:
                    found[after] = pushes + 1
    return found
