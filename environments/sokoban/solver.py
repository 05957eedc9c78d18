"""Solving rooms: searching ahead from the state and back from every solution until both meet.

The side whose last layer has fewer states goes on, so that each goes about half the way. The first layers that meet
hold every shortest solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from envkit.errors import SearchLimitError, UsageError

from .search import Layer, Position, read_position, search_ahead, search_back

MAX_STATES = 500_000
"""About 100 MB, and half a second."""


def solve(board: str, *, max_states: int = MAX_STATES) -> tuple[str, ...] | None:
    """Return a solution with the fewest moves, and the fewest pushes among those; None when there is no solution.

    Args:
        board: A room in canonical symbols; it may be solved already.
        max_states: No further layer of states is searched once so many are known.

    Raises:
        OutOfReachError: The search ended before it knew.
        UsageError: `board` is no room.
    """
    position = read_position(board)
    if position is None:
        raise UsageError(
            f"no room to solve: it must be a walled rectangle with a player, boxes and as many targets:\n{board}"
        )
    meeting = _meet(position, max_states)
    if meeting is None:
        return None
    room, (ahead, back) = position.room, meeting
    state = min(_met(meeting), key=lambda state: ahead[-1][state] + back[-1][state])
    path = [state]
    for layer, after in zip(ahead[-2::-1], ahead[:0:-1], strict=True):
        pushes = after[path[0]]
        options = room.before(path[0]).items()
        path.insert(0, next(state for state, push in options if layer.get(state, -2) + push == pushes))
    for layer, before in zip(back[-2::-1], back[:0:-1], strict=True):
        pushes = before[path[-1]]
        options = room.after(path[-1]).items()
        path.append(next(state for state, push in options if layer.get(state, -2) + push == pushes))
    return tuple(room.move_between(here, there) for here, there in pairwise(path))


def first_steps(position: Position, max_states: int = MAX_STATES) -> Sequence[int]:
    """Return the states after the first moves of all shortest solutions; empty when there is none, or when solved.

    Raises:
        OutOfReachError: The search ended before it knew.
    """
    meeting = _meet(position, max_states)
    if meeting is None:
        return ()
    room, ahead = position.room, meeting.ahead
    on_the_way = set(_met(meeting))
    for layer in ahead[-2:0:-1]:
        on_the_way = {state for after in on_the_way for state in room.before(after) if state in layer}
    return [state for state in room.after(position.state) if state in on_the_way]


class _Meeting(NamedTuple):
    """The layers of both searches; the last ones have states in common."""

    ahead: list[Layer]
    back: list[Layer]


def _met(meeting: _Meeting) -> list[int]:
    """Return the states that are half way on a shortest solution, one of each at least."""
    return [state for state in meeting.ahead[-1] if state in meeting.back[-1]]


def _meet(position: Position, max_states: int) -> _Meeting | None:
    room, state = position
    if state & room.dead:
        return None
    searches = search_ahead(room, state), search_back(room)
    meeting = _Meeting([next(searches[0])], [next(searches[1])])
    known = len(meeting.back[0])
    while meeting.ahead[-1].keys().isdisjoint(meeting.back[-1].keys()):
        if known > max_states:
            raise SearchLimitError(f"no solution is known after searching {known} states")
        side = len(meeting.ahead[-1]) > len(meeting.back[-1])
        layer = next(searches[side], None)
        if layer is None:
            return None
        meeting[side].append(layer)
        known += len(layer)
    return meeting
