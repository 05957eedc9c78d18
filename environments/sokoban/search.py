"""Breadth-first search in rooms: backwards from all solved states by pulling boxes, and forwards by pushing boxes.

Both searches proceed layer by layer. The states of layer n are exactly n moves from the start of the search. For each
state, the search computes the fewest pushes among the paths with the fewest moves.

The number of a floor cell is called its place. A state is one integer: its 10 lowest bits contain the player's place.
Of the higher bits, each belongs to one place, and is set if a box is there.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

from ..board import MOVES
from .rules import SYMBOLS

SHIFT = 10
PLAYER = (1 << SHIFT) - 1
"""Bit mask of the player's place in a state."""

Layer: TypeAlias = dict[int, int]
"""Maps each state of a layer to the fewest pushes between the start of the search and this state."""

_BLOCKED = -1  # All bits of -1 are set, which means a box on every cell.
_EMPTY = str.maketrans({"P": "_", "X": "_", "S": "O", "√": "O"})
_KNOWN = frozenset(SYMBOLS + "\n")
_Table: TypeAlias = list[list[tuple[int, int, int, int]]]


class PushGraph:
    """The walls and targets of a room, and the possible moves from each place.

    Args:
        cells: Cells without a wall, at most 1024. The index of a cell in this list is its place.
        targets: The cells that are targets.
        width: Number of characters of a line of the board, including the newline.
    """

    def __init__(self, cells: Sequence[int], targets: Sequence[int], width: int) -> None:
        self.cells = cells
        self.width = width
        self.places = {cell: place for place, cell in enumerate(cells)}
        self.solved = sum([1 << SHIFT + self.places[target] for target in targets])

    @cached_property
    def back(self) -> _Table:
        """For each place of the player, a row for each move that may have led there.

        A row has four columns:

        1. The box that would block the place from which the player came.
        2. The change of the state if the player goes back to that place alone.
        3. The box that the player may have pushed with this move.
        4. The change of the state if the player goes back and pulls this box along.
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
        """For each place of the player, a row for each move.

        A row has four columns: the bit of the box to push, the change of the state by walking, the bits of boxes that
        would block the push, and the change of the state by pushing.
        """
        return self._table_ahead(self.places)

    @cached_property
    def ahead_alive(self) -> _Table:
        """The table `ahead` without pushes onto cells from which a box cannot reach any target."""
        return self._table_ahead(self.alive)

    @cached_property
    def dead(self) -> int:
        """The bits of boxes on dead cells (see `alive`): ``state & dead`` is 0 if no box is on a dead cell."""
        return sum([1 << SHIFT + place for cell, place in self.places.items() if cell not in self.alive])

    @cached_property
    def alive(self) -> frozenset[int]:
        """Cells from which a box can reach some target. All other cells are dead."""
        found = [cell for cell, place in self.places.items() if self.solved >> SHIFT + place & 1]
        alive = set(found)
        for cell in found:  # the loop appends to `found`
            for step in (-self.width, self.width, -1, 1):
                before = cell + step
                if before not in alive and before in self.places and before + step in self.places:
                    alive.add(before)
                    found.append(before)
        return frozenset(alive)

    def before(self, state: int) -> Layer:
        """Return the states one move before `state`, each mapped to 1 if that move is a push, otherwise 0."""
        return _layer_before(self.back, {state: 0}, ())

    def after(self, state: int) -> Layer:
        """Return the states one move after `state` in the order of `MOVES`, each mapped to 1 for a push, else to 0."""
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
    """A board, separated into its room (walls and targets) and its state (the places of the player and the boxes)."""

    room: PushGraph
    state: int


def read_position(board: str) -> Position | None:
    """Return the position on `board`; None if the board is not a playable room.

    A room is a rectangle of known symbols, enclosed by walls, with one player, at least one box, and as many targets
    as boxes.
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
    """Return the room on the board `text`, which must have no player and no boxes."""
    cells = [cell for cell, symbol in enumerate(text) if symbol in "_O"]
    return PushGraph(cells, [cell for cell in cells if text[cell] == "O"], text.find("\n") + 1)


def search_back(room: PushGraph) -> Iterator[Layer]:
    """Yield layers: the states that are 0, 1, 2... moves before a solved state, until no states are left."""
    table, solved = room.back, room.solved
    layer = {solved | place: 0 for place in range(len(table)) if not solved >> SHIFT + place & 1}
    seen = set(layer)
    while layer:
        yield layer
        layer = _layer_before(table, layer, seen)
        seen.update(layer)


def search_ahead(room: PushGraph, state: int) -> Iterator[Layer]:
    """Yield layers: the states that are 0, 1, 2... moves after `state`, until no states are left.

    The search omits pushes onto dead cells, since no solution follows from them.
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
            if state & box:  # the last move may have pushed the box that is now ahead of the player
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
