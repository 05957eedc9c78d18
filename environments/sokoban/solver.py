"""A solver for rooms: bidirectional search, forwards from a state and backwards from all solved states.

Each round adds one layer, the states one move further away, to the search whose last layer is smaller. When the last
layers of both searches have states in common, every shortest solution passes through one of these states.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from envkit.errors import SearchLimitError, UsageError

from .search import Layer, Position, read_position, search_ahead, search_back

MAX_STATES = 500_000
"""Default limit on the number of states. A search up to this limit takes about 100 MB and half a second."""


def solve(board: str, *, max_states: int = MAX_STATES) -> tuple[str, ...] | None:
    """Return a shortest solution: of those with the fewest moves, one with the fewest pushes. None if unsolvable.

    Args:
        board: A room in the game's own symbols; it may already be solved.
        max_states: Limit on the number of states. The search ends after the layer that exceeds the limit.

    Raises:
        SearchLimitError: The search reached `max_states` without a result.
        UsageError: `board` is not a room.
    """
    position = read_position(board)
    if position is None:
        raise UsageError(
            f"the board must be a rectangle enclosed by walls, with one player, and as many targets as boxes:\n{board}"
        )
    meeting = _meet(position, max_states)
    if meeting is None:
        return None
    room, (ahead, back) = position.room, meeting
    state = min(_common(meeting), key=lambda state: ahead[-1][state] + back[-1][state])
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
    """Return the state after the first move of each shortest solution; empty if `position` is solved or unsolvable.

    Raises:
        SearchLimitError: The search reached `max_states` without a result.
    """
    meeting = _meet(position, max_states)
    if meeting is None:
        return ()
    room, ahead = position.room, meeting.ahead
    on_path = set(_common(meeting))
    for layer in ahead[-2:0:-1]:
        on_path = {state for after in on_path for state in room.before(after) if state in layer}
    return [state for state in room.after(position.state) if state in on_path]


class _Meeting(NamedTuple):
    """The layers of both searches. The last layers of the two have states in common."""

    ahead: list[Layer]
    back: list[Layer]


def _common(meeting: _Meeting) -> list[int]:
    """Return the states where both searches meet; every shortest solution passes through one of them."""
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
            raise SearchLimitError(f"found no solution in {known} states (limit {max_states}); raise max_states")
        side = len(meeting.ahead[-1]) > len(meeting.back[-1])
        layer = next(searches[side], None)
        if layer is None:
            return None
        meeting[side].append(layer)
        known += len(layer)
    return meeting
