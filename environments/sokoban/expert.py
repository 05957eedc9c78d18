"""A player that knows Sokoban: it reads the room from the observation and searches for the shortest solutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from envkit.errors import SearchLimitError
from envkit.types import JSON, Observation

from ..board import find_board
from .rules import SYMBOLS
from .search import Position, PushGraph, read_position, search_back
from .solver import MAX_STATES, first_steps


class SokobanExpert:
    """Plays shortest solutions.

    For rooms with few states it knows all that can be solved; in others it solves what it sees.

    Args:
        symbols: Like `spaced`, an option of the episodes that it plays; the others change nothing that it does.
        spaced: See `symbols`.
        max_table: About how many states a room may have to be known as a whole.
        max_states: About how many states to search in another room; a solution that is farther has no known move.
    """

    def __init__(
        self,
        *,
        symbols: str | None = None,
        spaced: bool = False,
        max_table: int = 4_000,
        max_states: int = MAX_STATES,
        **options: JSON,
    ) -> None:
        # What is ours and not among theirs means nothing.
        self._meaning = None if symbols is None else str.maketrans(SYMBOLS + symbols, "?" * len(SYMBOLS) + SYMBOLS)
        self._spaced = spaced
        self._max_table = max_table
        self._max_states = max_states

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return every first move of a shortest solution; empty when solved, unsolvable or out of reach."""
        position = self._read(observation)
        if position is None:
            return ()
        room, state = position
        depths = _depths(room, self._max_table)
        if depths is None:
            try:
                steps = first_steps(position, self._max_states)
            except SearchLimitError:
                return ()
        else:
            depth = depths.get(state, 0)
            steps = [after for after in room.after(state) if depths.get(after, depth) == depth - 1]
        return [room.move_between(state, after) for after in steps]

    def is_tricky(self, observation: Observation) -> bool:
        """Say whether some push makes a level that can be solved unsolvable.

        In rooms with many states only a push onto a cell counts from which a box can be brought to no target.
        """
        position = self._read(observation)
        if position is None:
            return False
        room, state = position
        depths = _depths(room, self._max_table)
        if depths is None:
            return not state & room.dead and any(after & room.dead for after in room.after(state))
        return state in depths and any(after not in depths for after in room.after(state))

    def answer(self, move: str) -> str:
        return f"<answer>{move}</answer>"

    def _read(self, observation: Observation) -> Position | None:
        """Return the position that is seen; None when there is none that can be played."""
        board = find_board(observation.text, spaced=self._spaced)
        if self._meaning is not None:
            board = board.translate(self._meaning)
        return read_position(board) if "X" in board else None


@lru_cache(maxsize=256)
def _depths(room: PushGraph, max_states: int) -> Mapping[int, int] | None:
    """Return the moves of a shortest solution by state, for all that can be solved; None when they are too many."""
    depths: dict[int, int] = {}
    for depth, layer in enumerate(search_back(room)):
        depths.update(dict.fromkeys(layer, depth))
        if len(depths) > max_states:
            return None
    return depths
