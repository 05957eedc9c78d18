"""A slow forward search by Dijkstra's algorithm, independent of the code under test."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TypeAlias

Cell: TypeAlias = tuple[int, int]
State: TypeAlias = tuple[Cell, frozenset[Cell]]
Cost: TypeAlias = tuple[int, int]

_WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def slow_cost(board: str) -> Cost | None:
    """Return the moves of a shortest solution and the fewest pushes among those; None when there is no solution."""
    floor, targets, start = _read(board)
    return _cost(floor, targets, start)


def slow_costs_after(board: str) -> dict[str, Cost | None]:
    """Return the same for the state after each move that changes something."""
    floor, targets, start = _read(board)
    return {way: _cost(floor, targets, state) for way, _, state in _moves(floor, start)}


def _read(board: str) -> tuple[frozenset[Cell], frozenset[Cell], State]:
    tiles = {(row, column): tile for row, line in enumerate(board.split("\n")) for column, tile in enumerate(line)}
    floor = frozenset(cell for cell, tile in tiles.items() if tile != "#")
    targets = frozenset(cell for cell, tile in tiles.items() if tile in "O√S")
    boxes = frozenset(cell for cell, tile in tiles.items() if tile in "X√")
    [player] = [cell for cell, tile in tiles.items() if tile in "PS"]
    return floor, targets, (player, boxes)


def _moves(floor: frozenset[Cell], state: State) -> Iterator[tuple[str, int, State]]:
    (row, column), boxes = state
    for way, (down, right) in _WAYS.items():
        to = (row + down, column + right)
        beyond = (row + 2 * down, column + 2 * right)
        if to in boxes and beyond in floor and beyond not in boxes:
            yield way, 1, (to, boxes - {to} | {beyond})
        elif to in floor and to not in boxes:
            yield way, 0, (to, boxes)


def _cost(floor: frozenset[Cell], targets: frozenset[Cell], start: State) -> Cost | None:
    queue: list[tuple[int, int, int, State]] = [(0, 0, 0, start)]
    done: set[State] = set()
    number = 0  # so that states are never compared
    while queue:
        moves, pushes, _, state = heapq.heappop(queue)
        if state[1] == targets:
            return moves, pushes
        if state in done:
            continue
        done.add(state)
        for _, push, after in _moves(floor, state):
            number += 1
            if after not in done:
                heapq.heappush(queue, (moves + 1, pushes + push, number, after))
    return None
