"""A player that knows Sokoban: it reads the room from the observation and searches for the shortest solutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from envkit.environments.board import find_board
from envkit.environments.sokoban.search import PLAYER, Depths, search_back, steps_of
from envkit.types import Observation

_EMPTY = str.maketrans({"P": "_", "X": "_", "S": "O", "√": "O"})
_SYMBOLS = frozenset("#_O√XPS\n")


class SokobanExpert:
    """Plays shortest solutions.

    One search backwards serves every state of rooms with the same walls and targets, and is remembered. Both searches
    are bounded; a state that they do not reach has no known move. With one box they reach every state.

    Args:
        max_states_back: About how many states to find from the solutions.
        max_states_ahead: About how many to find from a state that is not among those.
    """

    def __init__(self, *, max_states_back: int = 100_000, max_states_ahead: int = 50_000, **options: object) -> None:
        self._max_states_back = max_states_back
        self._max_states_ahead = max_states_ahead

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return every first move of a shortest solution; empty when solved, unsolvable or out of reach."""
        position = _read(observation.text)
        if position is None:
            return ()
        depths = self._depths(position)
        depth = depths.moves.get(position.state)
        if depth is None:
            return [] if depths.is_complete else _meet(position, depths, self._max_states_ahead)
        return [move for move, state in _followers(position) if depths.moves.get(state) == depth - 1]

    def is_tricky(self, observation: Observation) -> bool:
        """Say whether some push makes a level that can be solved unsolvable.

        Rooms too large for a complete search count as not tricky.
        """
        position = _read(observation.text)
        if position is None:
            return False
        depths = self._depths(position)
        if not depths.is_complete or position.state not in depths.moves:
            return False
        return any(state not in depths.moves for _, state in _followers(position))

    def answer(self, move: str) -> str:
        return f"<answer>{move}</answer>"

    def _depths(self, position: _Position) -> Depths:
        find = _depths_of_small if position.boxes == 1 else _depths_of_large
        return find(position.room, self._max_states_back)


class _Position(NamedTuple):
    """What an observation shows: the room without player and boxes, and where those are."""

    room: str
    boxes: int
    state: int


def _read(text: str) -> _Position | None:
    """Return the position on the board in `text`; None when there is none that can be played."""
    board = find_board(text)
    player = max(board.find("P"), board.find("S"))
    if player < 0 or "X" not in board or len(board) > PLAYER or not _SYMBOLS.issuperset(board):
        return None
    mask = boxes = 0
    for box in ("X", "√"):
        cell = board.find(box)
        while cell >= 0:
            mask |= 1 << cell
            boxes += 1
            cell = board.find(box, cell + 1)
    room = board.translate(_EMPTY)
    size = board.find("\n")
    is_walled = room[: size + 1] + room[-size - 1 :] + room[:: size + 1] + room[size - 1 :: size + 1]
    if is_walled.strip("#\n") or room.count("O") != boxes:
        return None
    return _Position(room, boxes, mask << 8 | player)


def _search(room: str, max_states: int) -> Depths:
    floor = [cell for cell, tile in enumerate(room) if tile in "_O"]
    targets = [cell for cell in floor if room[cell] == "O"]
    width = room.find("\n") + 1
    return search_back(floor, targets, width=width, max_depth=len(room) ** 2, max_states=max_states)


_depths_of_small = lru_cache(maxsize=1024)(_search)
_depths_of_large = lru_cache(maxsize=16)(_search)  # up to 20 MB each


def _followers(position: _Position) -> Iterator[tuple[str, int]]:
    """Yield each move that changes something, and the state that it leads to."""
    room, boxes, player = position.room, position.state >> 8, position.state & PLAYER
    for move, step in steps_of(room.find("\n") + 1).items():
        to = player + step
        if room[to] == "#":
            continue
        if not boxes >> to & 1:
            yield move, boxes << 8 | to
        elif room[to + step] != "#" and not boxes >> to + step & 1:
            yield move, (boxes ^ (1 << to | 1 << to + step)) << 8 | to


def _meet(position: _Position, depths: Depths, max_states: int) -> list[str]:
    """Search ahead until the states that were found backwards are met; return the first moves of shortest ways there.

    The first layer that meets them does so at their deepest, so these are the shortest solutions.
    """
    first_moves = {state: {move: None} for move, state in _followers(position)}
    seen = {position.state, *first_moves}
    while first_moves and len(seen) < max_states:
        met = [moves for state, moves in first_moves.items() if state in depths.moves]
        if met:
            together = {move for moves in met for move in moves}
            return [move for move, _ in _followers(position) if move in together]
        following: dict[int, dict[str, None]] = {}
        for state, moves in first_moves.items():
            for _, after in _followers(position._replace(state=state)):
                if after not in seen or after in following:
                    following.setdefault(after, {}).update(moves)
                    seen.add(after)
        first_moves = following
    return []
