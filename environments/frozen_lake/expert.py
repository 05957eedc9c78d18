"""The expert player of the frozen lake."""

from __future__ import annotations

from collections.abc import Sequence

from envkit.types import JSON, Observation

from ..board import MOVES, find_board
from .game import LakeOptions
from .lakes import SYMBOLS, layers_of
from .slippery import best_moves


class FrozenLakeExpert:
    """Walks a shortest path on the observed lake. On slippery ice, the expert follows a plan that allows for slips.

    All arguments are options of the environment; see `LakeOptions`.

    Args:
        symbols: The characters that the observation shows.
        spaced: Whether there are spaces between the characters.
        slip: Chance of a slip. If above 0, the expert plays the plan of `best_moves`.
        size: `size`, `map` and `max_moves` together determine the move limit that `best_moves` needs.
        map: See `size`.
        max_moves: See `size`.
        options: Other options, which have no effect on the expert.

    Raises:
        OptionError: An option is invalid.
    """

    def __init__(
        self,
        *,
        symbols: str | None = None,
        spaced: bool = False,
        slip: float = 0.0,
        size: int | None = None,
        map: str | Sequence[str] | None = None,
        max_moves: int | None = None,
        **options: JSON,
    ) -> None:
        chosen = LakeOptions(symbols=symbols, spaced=spaced, slip=slip, size=size, map=map, max_moves=max_moves)
        # Maps the shown symbols to the game's own. A game symbol that is not among the shown ones becomes "?".
        self._to_ours = None if symbols is None else str.maketrans(SYMBOLS + symbols, "?" * len(SYMBOLS) + SYMBOLS)
        self._spaced = spaced
        self._slip = slip
        self._move_limit = chosen.move_limit

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return the first moves of all shortest paths; on slippery ice, the moves that `best_moves` returns.

        The result is empty if the episode has ended or no path leads to the goal.
        """
        board = self._read(observation)
        layers = layers_of(board)
        if not layers:
            return ()
        if self._slip:
            plan = best_moves(board.replace("P", "_"), self._slip, self._move_limit)
            return plan[board.replace("\n", "").find("P")]
        width = board.find("\n") + 1
        here = 1 << (len(board) - 1 - board.find("P"))
        around = (here << width, here >> width, here << 1, here >> 1)
        return [move for move, cell in zip(MOVES, around, strict=True) if cell & layers[-1]]

    def is_hazardous(self, observation: Observation) -> bool:
        """Return whether a move that brings the player nearer to the goal's row or column ends in a hole."""
        board = self._read(observation)
        here, goal, width = board.find("P"), board.find("G"), board.find("\n") + 1
        if here < 0 or goal < 0:
            return False
        down = goal // width - here // width
        right = goal % width - here % width
        return (down != 0 and board[here + (width if down > 0 else -width)] == "O") or (
            right != 0 and board[here + (1 if right > 0 else -1)] == "O"
        )

    def answer(self, move: str) -> str:
        return f"<answer>{move}</answer>"

    def _read(self, observation: Observation) -> str:
        board = find_board(observation.text, spaced=self._spaced)
        return board if self._to_ours is None else board.translate(self._to_ours)
