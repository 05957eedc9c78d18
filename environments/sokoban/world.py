"""Sokoban as an environment; the package's doc string is its card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium

from envkit.environments.answer import parse_answer
from envkit.environments.board import MOVES, UNREADABLE
from envkit.environments.options import check_boolean, check_choice, check_integer, check_number, override
from envkit.environments.sokoban.levels import draw_level
from envkit.environments.sokoban.rules import is_solved, play, reward_of
from envkit.environments.split import SPLITS, Split
from envkit.errors import StepOrderError
from envkit.spaces import Utf8Text
from envkit.types import JSON, Info

_RULES = """\
You are the player in a Sokoban room. Push every box onto a target.
In the room, P is you, S is you on a target, # is a wall, _ is floor, X is a box, O is a target and √ is a box on a \
target.
The moves are up, down, left and right, each one cell. Walking into a box pushes it if the cell behind it is free; \
boxes cannot be pulled.
You have {max_moves} moves. Answer with one move, like this: <answer>up</answer>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SokobanOptions:
    """What can be changed about the rooms.

    Attributes:
        size: Cells along one side, walls included, 5 to 15.
        boxes: Number of boxes and of targets, 1 to 4.
        max_moves: Moves until the episode is truncated, 1 to 10,000; None means 15 for 6x6 with one box, and in
            proportion to size and boxes (`size` * `boxes` * 5 / 2).
        min_solution: Fewest moves of a level's shortest solution; None means 2.
        max_solution: Most moves of it, at most `max_moves`; None means 10 for 6x6 with one box, and in proportion.
        split: Draw only levels of this split ("train", "validation" or "eval"); None draws any.
        instructions: Whether observations carry rules and notices, or only the room.
        format_penalty: What is subtracted from the reward when an answer cannot be read, 0 to 100.
    """

    size: int = 6
    boxes: int = 1
    max_moves: int | None = None
    min_solution: int | None = None
    max_solution: int | None = None
    split: Split | None = None
    instructions: bool = True
    format_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_integer("size", self.size, low=5, high=15)
        check_integer("boxes", self.boxes, low=1, high=4)
        if self.max_moves is not None:
            check_integer("max_moves", self.max_moves, low=1, high=10_000)
        if self.max_solution is not None:
            check_integer("max_solution", self.max_solution, low=1, high=self.move_limit)
        if self.min_solution is not None:
            check_integer("min_solution", self.min_solution, low=1, high=self.longest)
        if self.split is not None:
            check_choice("split", self.split, SPLITS)
        check_boolean("instructions", self.instructions)
        check_number("format_penalty", self.format_penalty, low=0, high=100)

    @property
    def move_limit(self) -> int:
        """Moves until the episode is truncated."""
        return self.size * self.boxes * 5 // 2 if self.max_moves is None else self.max_moves

    @property
    def longest(self) -> int:
        """Most moves that a shortest solution may have."""
        usual = self.size * self.boxes * 5 // 3
        return min(self.move_limit, usual) if self.max_solution is None else self.max_solution

    @property
    def least(self) -> int:
        """Fewest moves that a shortest solution may have."""
        return min(2, self.longest) if self.min_solution is None else self.min_solution


class Sokoban(gymnasium.Env[str, str]):
    """Sokoban; keyword arguments are `SokobanOptions`, which ``reset(options=...)`` overrides.

    Raises:
        OptionError: An option is unknown or its value is refused.
    """

    metadata = {  # noqa: RUF012 - Gymnasium's own declaration is an instance variable
        "render_modes": ["ansi"],
        "metrics": {"action_is_valid": "mean", "action_is_effective": "mean", "success": "last"},
    }

    def __init__(self, *, render_mode: str | None = None, **options: JSON) -> None:
        if render_mode is not None:
            check_choice("render_mode", render_mode, ["ansi"])
        self.render_mode = render_mode
        self.observation_space = Utf8Text(4096)
        self.action_space = Utf8Text(1 << 20)
        self._defaults = override(SokobanOptions(), options)
        self._options = self._defaults
        self._running = False
        self._board = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self._running = False
        chosen = override(self._defaults, options)
        super().reset(seed=seed)
        level_seed = int(self.np_random.integers(1 << 31)) if seed is None else int(seed)
        level = draw_level(level_seed, chosen.size, chosen.boxes, chosen.least, chosen.longest, chosen.split)
        self._options = chosen
        self._limit = chosen.move_limit
        self._board = level.board
        self._moves = 0
        self._running = True
        info: Info = {"success": False, "legal_moves": list(MOVES), "level": {"shortest": level.shortest}}
        if not chosen.instructions:
            return level.board, info
        return f"{_RULES.format(max_moves=self._limit)}\n\n{level.board}", info

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if not self._running:
            raise StepOrderError("step before reset, or after the end of the episode")
        move = parse_answer(action, MOVES)
        before = self._board
        text = after = before if move is None else play(before, move)
        self._board = after
        self._moves += 1
        terminated = is_solved(after)
        truncated = self._moves >= self._limit and not terminated
        self._running = not (terminated or truncated)
        reward = reward_of(before, after)
        if move is None:
            reward -= self._options.format_penalty
            if self._options.instructions:
                text = f"{UNREADABLE}\n{after}"
        info: Info = {
            "action_is_valid": move is not None,
            "action_is_effective": after != before,
            "success": terminated,
            "legal_moves": list(MOVES),
        }
        return text, reward, terminated, truncated, info

    def render(self) -> str:
        """Return the room as it is now; empty before the first reset."""
        return self._board
