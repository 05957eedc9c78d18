"""The expert player of Sokoban: reads the room from the observation and searches for the shortest solutions."""

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
    """Plays a shortest solution of the observed room; `symbols` and `spaced` are options of the environment.

    In a room with up to about `max_table` states, the expert tabulates all solvable states. In other rooms, it solves
    each observed state; if the search exceeds about `max_states` states, it has no move. `options` have no effect.
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
        # Maps the shown symbols to the game's own. A game symbol that is not among the shown ones becomes "?".
        self._to_ours = None if symbols is None else str.maketrans(SYMBOLS + symbols, "?" * len(SYMBOLS) + SYMBOLS)
        self._spaced = spaced
        self._max_table = max_table
        self._max_states = max_states

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return the first moves of all shortest solutions.

        The result is empty if the room is solved or unsolvable, or if the search reaches its limit.
        """
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

    def is_hazardous(self, observation: Observation) -> bool:
        """Return whether some push makes a solvable level unsolvable.

        In rooms with many states, only pushes onto a dead cell count. A box on a dead cell cannot reach any target.
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
        """Return the observed position; None if the board is not a playable room."""
        board = find_board(observation.text, spaced=self._spaced)
        if self._to_ours is not None:
            board = board.translate(self._to_ours)
        return read_position(board) if "X" in board else None


@lru_cache(maxsize=256)
def _depths(room: PushGraph, max_states: int) -> Mapping[int, int] | None:
    """Return the number of moves from each solvable state to a solution; None if there are more than `max_states`."""
    depths: dict[int, int] = {}
    for depth, layer in enumerate(search_back(room)):
        depths.update(dict.fromkeys(layer, depth))
        if len(depths) > max_states:
            return None
    return depths
