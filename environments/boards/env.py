"""One board game as a ``gymnasium.Env``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from envkit.env import check_seed
from envkit.errors import OptionError, StepOrderError
from envkit.spaces import Utf8Text
from envkit.types import JSON, Info, Options

from ..board import MOVES, UNREADABLE, UNREADABLE_TURN, spread_out, steps_of
from ..counter_rng import chance, episode_seed, spread
from ..options import check_choice, override
from .actions import read_answer, read_index
from .game import BoardGame, BoardOptions, OptionsT
from .pictures import colour, paint, read_tiles
from .slip_noise import slipped

OBSERVATIONS = ("text", "grid")
ACTIONS = ("text", "index")
RENDER_MODES = ("text", "ansi", "rgb_array")

METRICS = {"action_is_valid": "mean", "action_is_effective": "mean", "success": "last"}
MAX_ANSWER = 1 << 20
"""Maximum length in characters of an answer in the action space. `step` accepts longer answers too."""


def spaces_of(
    game: BoardGame[Any], options: BoardOptions, observation: str, action: str
) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """Return the observation space and the action space of one copy of `game`.

    Raises:
        OptionError: The value of `observation` or `action` is unknown.
    """
    check_choice("observation", observation, OBSERVATIONS)
    check_choice("action", action, ACTIONS)
    side = options.side
    space = Box(0, len(game.physics.symbols) - 1, (side, side), np.uint8) if observation == "grid" else Utf8Text(4096)
    return space, Utf8Text(MAX_ANSWER) if action == "text" else Discrete(len(MOVES))


def change(defaults: OptionsT, changes: Mapping[str, Any] | None) -> OptionsT:
    """Return the options of an episode: `defaults`, overridden by the options passed to `reset`.

    Raises:
        OptionError: An option is unknown, its value is invalid, or `reset` cannot change it.
    """
    for name in defaults.for_make.intersection(changes or ()):
        if changes is not None and changes[name] != getattr(defaults, name):
            raise OptionError(name, "cannot be set by reset, only by make or register(..., options=...)")
    return override(defaults, changes)


class BoardEnv(gymnasium.Env[Any, Any]):
    """A board game, one episode at a time.

    Args:
        observation: ``"text"`` for the board with rules and notices, or ``"grid"`` for the cell codes [size, size].
        action: ``"text"`` for answers such as ``<answer>up</answer>``, or ``"index"`` for indices into `MOVES`.
        render_mode: ``"text"`` or ``"ansi"`` (with colours) renders the board as text, ``"rgb_array"`` as a picture.
        options: The game's options; ``reset(options=...)`` overrides single options for one episode.

    Raises:
        OptionError: An option is unknown or its value is invalid.
    """

    game: ClassVar[BoardGame[Any]]
    options: ClassVar[Options]
    """Names of the game's options, with their defaults."""
    metadata = {"render_modes": list(RENDER_MODES), "render_fps": 4, "metrics": METRICS}  # noqa: RUF012 - as Gymnasium's

    def __init__(
        self, *, observation: str = "text", action: str = "text", render_mode: str | None = None, **options: JSON
    ) -> None:
        if render_mode is not None:
            check_choice("render_mode", render_mode, RENDER_MODES)
        self.render_mode = render_mode
        self._defaults = override(self.game.defaults, options)
        self.observation_space, self.action_space = spaces_of(self.game, self._defaults, observation, action)
        self._is_grid = observation == "grid"
        self._is_text = action == "text"
        self._running = False
        self._first, self._episode = -1, -1
        self._cells: list[str] = []
        self._options = self._defaults

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Start an episode. A `seed` starts a sequence of levels; a reset without `seed` takes the next level.

        For this episode, `options` override the options given to `make`. The method returns the observation and an
        info dict with ``success``, ``legal_moves`` and, if facts about the level are known, ``level``.
        """
        self._running = False
        chosen = change(self._defaults, options)
        if self._is_grid and chosen.side != self._defaults.side:
            raise OptionError("size", f"must stay {self._defaults.side} for grid observations, got {chosen.side}")
        check_seed(seed)
        super().reset(seed=seed)
        if seed is None and self._first < 0:
            seed = int(self.np_random.integers(1 << 31))
        first, episode = (self._first, self._episode + 1) if seed is None else (int(seed), 0)
        level_seed, count = episode_seed(first, episode), self.game.num_levels(chosen)
        level = self.game.draw(level_seed if count is None else spread(level_seed) % count, chosen)
        self._first, self._episode, self._options = first, episode, chosen
        if episode == 0:
            self._ticks = 0
        self._limit, self._slip = chosen.move_limit, self.game.slip(chosen)
        self._rewards = self.game.rewards(chosen)
        self._shown = None if chosen.symbols is None else _translation(chosen)
        self._cells = list(level.board)
        self._here = self.game.physics.find_player(level.board)
        self._left = level.board.count(self.game.physics.wanted)
        self._goals = self._left + level.board.count(self.game.physics.done)
        self._steps = steps_of(level.board.find("\n") + 1)
        self._moves = 0
        self._running = True
        info: Info = {"success": False, "legal_moves": list(MOVES)}
        if level.facts:
            info["level"] = dict(level.facts)
        rules = f"{self.game.rules(chosen)}\n\n" if chosen.instructions else ""
        return self._observe(rules), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """Play an answer such as ``"<answer>up</answer>"``; with ``action="index"``, play the move with this index.

        An unreadable answer counts as a move that does nothing. The method returns the observation, the reward, whether
        the game is won or lost (terminated), whether the moves ran out (truncated), and an info dict. The dict contains
        ``action_is_valid``, ``action_is_effective``, ``success`` and ``legal_moves``.
        """
        if not self._running:
            raise StepOrderError("step before reset, or after the end of the episode")
        options, rewards, physics = self._options, self._rewards, self.game.physics
        moves = read_answer(action, options.actions_per_turn) if self._is_text else read_index(action)
        total = 0.0
        effective = won = lost = late = False
        for move in moves or (None,):
            gain = 0
            if move is not None:
                if self._slip:
                    move = slipped(move, self._slip, chance(self._first, self._ticks))
                moved = physics.move(self._cells, self._here, self._steps[move])
                if moved is not None:
                    effective, gain = True, moved
                    self._here += self._steps[move]
                    self._left -= gain
                    won = self._left == 0
                    lost = self._cells[self._here] in physics.fatal
            self._moves += 1
            self._ticks += 1
            total += rewards.move + rewards.progress * gain + (rewards.won if won else 0.0)
            late = self._moves >= self._limit and not (won or lost)
            if won or lost or late:
                self._running = False
                break
        if late:
            total += rewards.unfinished * (self._goals - self._left) / self._goals
        notice = ""
        if not moves:
            total -= options.format_penalty
            notice = unreadable(options.actions_per_turn) if options.instructions else ""
        info: Info = {
            "action_is_valid": moves != (),
            "action_is_effective": effective,
            "success": won,
            "legal_moves": list(MOVES),
        }
        return self._observe(notice), total, won or lost, late, info

    def render(self) -> Any:
        """Return the board in the form of `render_mode`; None before the first reset, or if `render_mode` is None."""
        if not self._cells or self.render_mode is None:
            return None
        return show("".join(self._cells), self.game, self._options, self.render_mode)

    def _observe(self, above: str) -> Any:
        board = "".join(self._cells)
        if self._is_grid:
            side = self._options.side
            return self.game.physics.encode(board).reshape(side, side).copy()
        board = board if self._shown is None else board.translate(self._shown)
        return above + (spread_out(board) if self._options.spaced else board)


def unreadable(turn: int) -> str:
    """Return the notice for an unreadable answer; `turn` is the maximum number of moves per answer."""
    return f"{UNREADABLE if turn == 1 else UNREADABLE_TURN}\n"


def show(board: str, game: BoardGame[Any], options: BoardOptions, render_mode: str) -> str | NDArray[np.uint8]:
    """Return `board` as text or as a picture, depending on `render_mode`."""
    if render_mode == "rgb_array":
        return paint(game.physics.encode(board).reshape(options.side, options.side), read_tiles(game.tiles))
    if options.spaced:
        board = spread_out(board)
    if render_mode == "ansi":
        return colour(board, game.styles, options.shown)
    return board.translate(_translation(options))


def _translation(options: BoardOptions) -> dict[int, str]:
    return {ord(symbol): shown for symbol, shown in options.shown.items()}
