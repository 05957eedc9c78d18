"""Many board games as one ``gymnasium.vector.VectorEnv``, stepped in NumPy.

Given the same seeds and actions, `BoardVectorEnv` returns exactly what Gymnasium's ``SyncVectorEnv`` of single boards
returns, infos included, in all three autoreset modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from envkit.errors import OptionError, StepOrderError, UsageError
from envkit.types import JSON

from ..board import MOVES, spread_out
from ..counter_rng import episode_seed, episode_seed_B, spread_B
from ..options import check_choice, override
from .actions import read_answers, read_indices
from .batch import batch_of
from .env import RENDER_MODES, BoardEnv, change, show, spaces_of, unreadable
from .game import BoardGame
from .level_cache import Drawn, LevelCache
from .physics import STAY
from .pictures import paint, read_tiles
from .slip_noise import SlipNoise

_BITS = (1 << 64) - 1

Infos = dict[str, Any]


class BoardVectorEnv(VectorEnv[Any, Any, Any]):
    """Many copies of a board game.

    Do not modify the infos: one array may be the value of several keys, and boards share the lists in ``legal_moves``.

    Args:
        num_envs: Number of copies, at least 1.
        autoreset: When to reset a finished copy.
        options: Options of the game, as for `BoardEnv`. `reset` cannot change them.

    Raises:
        OptionError: An option is unknown or its value is invalid.
    """

    game: ClassVar[BoardGame[Any]]

    def __init__(
        self,
        num_envs: int,
        *,
        autoreset: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        observation: str = "text",
        action: str = "text",
        render_mode: str | None = None,
        **options: JSON,
    ) -> None:
        if render_mode is not None:
            check_choice("render_mode", render_mode, RENDER_MODES)
        self.num_envs = num_envs
        self.render_mode = render_mode
        self._defaults = override(self.game.defaults, options)
        self.single_observation_space, self.single_action_space = spaces_of(
            self.game, self._defaults, observation, action
        )
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._autoreset = AutoresetMode(autoreset)
        self.metadata = {**BoardEnv.metadata, "autoreset_mode": self._autoreset}
        self._is_grid = observation == "grid"
        self._is_text = action == "text"
        self._batch = batch_of(self.game.physics, num_envs, self._defaults.side)
        self._level_cache = LevelCache(self.game, self._defaults)
        self._limit, self._slip = self._defaults.move_limit, self.game.slip(self._defaults)
        rewards = self.game.rewards(self._defaults)
        # NumPy is faster with a one-element array than with a scalar.
        self._reward_won, self._reward_progress, self._reward_move = (
            np.array([reward]) for reward in (rewards.won, rewards.progress, rewards.move)
        )
        self._reward_unfinished = rewards.unfinished
        self._has_move_rewards = bool(rewards.move or rewards.progress or rewards.won != 1)
        self._slip_noise = SlipNoise(num_envs, self._slip)
        self._firsts: list[Any] = [None] * num_envs  # seed of each board's sequence of episodes; None before a reset
        self._first_N = np.zeros(num_envs, np.uint64)  # `counter_rng.spread` of each seed in `_firsts`
        self._episode_N = np.full(num_envs, -1)
        self._ticks_N = np.zeros(num_envs, np.int64)  # moves since the last seeded reset
        self._deadline_N = np.zeros(num_envs, np.int64)  # value of `_ticks_N` at which the episode is truncated
        self._goals_N = np.ones(num_envs, np.int64)
        self._was_reset = False
        self._is_over_N = np.zeros(num_envs, np.bool_)
        self._any_over = False
        self._texts = [""] * num_envs
        self._rules = f"{self.game.rules(self._defaults)}\n\n" if self._defaults.instructions else ""
        self._symbols = self._defaults.symbols or self._defaults.canonical
        self._all_N = _frozen(np.ones(num_envs, np.bool_))
        self._legal_N = np.full(num_envs, None, dtype=object)
        self._legal_N[:] = [list(MOVES)] * num_envs
        _frozen(self._legal_N)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Infos]:
        self._was_reset = False  # If this reset raises an error, the next step must fail.
        changes = dict(options or {})
        mask_N = _mask(changes.pop("reset_mask", self._all_N), self.num_envs)
        chosen = change(self._defaults, changes)
        for name in changes:
            if getattr(chosen, name) != getattr(self._defaults, name):
                raise OptionError(name, "reset cannot change it in native mode; set it in make_vec, or use mode='sync'")
        seeds = _seeds(seed, self.num_envs)
        rows_R = np.flatnonzero(mask_N)
        started = [self._next(row, seeds[row]) for row in rows_R.tolist()]
        level_seeds = [episode_seed(first, episode) for first, episode in started]
        drawn = self._level_cache.draw(
            level_seeds, spread_B(np.array([seed & _BITS for seed in level_seeds], np.uint64))
        )
        self._begin(rows_R, started)
        self._start(rows_R, drawn)
        self._is_over_N = self._is_over_N & ~mask_N
        self._any_over = bool(self._is_over_N.any())
        self._was_reset = bool(self._episode_N.min() >= 0)
        if not self._is_grid:
            self._write(rows_R)
        infos: Infos = {
            "success": np.zeros(self.num_envs, np.bool_),
            "_success": mask_N,
            "legal_moves": self._legal(mask_N),
            "_legal_moves": mask_N,
        }
        return self._observe(), infos | self._level_infos(mask_N, rows_R, drawn.facts)

    def step(self, actions: Any) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Infos]:
        if not self._was_reset:
            raise StepOrderError("step before reset")
        action_NT, valid_N = self._read(actions)
        restart_N, restart_R = self._is_over_N, _NO_ROWS
        restarted: Infos = {}
        played_N = self._all_N
        if self._any_over:
            restart_R = restart_N.nonzero()[0]
            if self._autoreset is AutoresetMode.DISABLED:
                raise StepOrderError(f"copies {restart_R.tolist()[:8]} have ended: reset them with reset_mask")
            # Restart finished copies now, and play `STAY` on them in this step: one pass can then observe all boards.
            restarted = self._restart(restart_N, restart_R)
            action_NT[restart_R, 0] = STAY
            if action_NT.shape[1] > 1:
                action_NT[restart_R, 1:] = -1
            played_N = ~restart_N
        reward_N, terminated_N, truncated_N, moved_N, won_N = self._play(action_NT, valid_N, played_N)
        infos = self._step_infos(played_N, len(restart_R), valid_N, moved_N, won_N) | restarted
        if not self._is_grid:
            self._texts = self._boards()
            self._add_texts_above(~valid_N & played_N, restart_R)
        self._is_over_N = terminated_N | truncated_N
        self._any_over = bool(np.count_nonzero(self._is_over_N))
        if self._any_over and self._autoreset is AutoresetMode.SAME_STEP:
            infos = self._end_and_restart(infos, self._is_over_N)
            self._any_over = False
        return self._observe(), reward_N, terminated_N, truncated_N, infos

    def render(self) -> tuple[Any, ...] | None:
        """Return a rendering of every copy; None without a render mode."""
        if self.render_mode is None:
            return None
        if not self._was_reset:
            return (None,) * self.num_envs
        if self.render_mode == "rgb_array":
            return tuple(paint(self._batch.grids(), read_tiles(self.game.tiles)))
        boards = self._batch.texts(self.game.physics.symbols)
        return tuple(show(board, self.game, self._defaults, self.render_mode) for board in boards)

    def _play(
        self, action_NT: NDArray[np.int64], valid_N: NDArray[np.bool_], played_N: NDArray[np.bool_]
    ) -> _StepArrays:
        """Play a turn of one or more moves on the boards where `played_N` is true."""
        turn = self._move(action_NT[:, 0], played_N)
        for action_N in action_NT.T[1:] if action_NT.shape[1] > 1 else ():
            goes_on_N = ~(turn.terminated_N | turn.truncated_N) & (action_N >= 0)
            if not goes_on_N.any():
                break
            more = self._move(np.where(goes_on_N, action_N, STAY), goes_on_N)
            turn.reward_N[goes_on_N] += more.reward_N[goes_on_N]
            for whole_N, part_N in zip(turn[1:], more[1:], strict=True):
                whole_N |= part_N & goes_on_N
        if self._reward_unfinished:
            done_N = (self._goals_N - self._batch.left_N) * self._reward_unfinished / self._goals_N
            turn.reward_N[turn.truncated_N] += done_N[turn.truncated_N]
        if self._defaults.format_penalty and not valid_N.all():
            turn.reward_N[~valid_N & played_N] -= self._defaults.format_penalty
        return turn

    def _move(self, action_N: NDArray[np.int64], playing_N: NDArray[np.bool_]) -> _StepArrays:
        """Play one move on the boards where `playing_N` is true. The other boards do not change and have reward 0."""
        if self._slip:
            action_N = self._slip_noise.turn(action_N, self._ticks_N)
        moved_N, gain_N, won_N, over_N = self._batch.play(action_N)
        self._ticks_N += playing_N
        reward_N = won_N.astype(np.float64)
        if self._has_move_rewards:
            reward_N *= self._reward_won
            moves_N = gain_N * self._reward_progress
            moves_N += self._reward_move
            reward_N += moves_N
            if playing_N is not self._all_N:
                reward_N *= playing_N
        truncated_N = np.greater(self._ticks_N >= self._deadline_N, over_N)
        return _StepArrays(reward_N, over_N, truncated_N, moved_N, won_N)

    def _read(self, actions: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the move indices of each turn [N, T], padded with -1, and whether each action is readable [N]."""
        if isinstance(actions, str) or not hasattr(actions, "__len__") or len(actions) != self.num_envs:
            raise UsageError(f"there are {self.num_envs} copies, got {np.size(actions)} actions; pass one per copy")
        return read_answers(actions, self._defaults.actions_per_turn) if self._is_text else read_indices(actions)

    def _next(self, row: int, seed: int | None) -> tuple[int, int]:
        """Return the next episode on board `row`: first seed of its sequence, number. A `seed` starts a sequence."""
        if seed is None and self._firsts[row] is None:
            seed = int(self.np_random.integers(1 << 31))
        return (self._firsts[row], int(self._episode_N[row]) + 1) if seed is None else (int(seed), 0)

    def _begin(self, rows_R: NDArray[np.int64], started: Sequence[tuple[int, int]]) -> None:
        """Record the episodes that start on the boards `rows_R`, given the seed and number that `_next` returned."""
        for row, (first, episode) in zip(rows_R.tolist(), started, strict=True):
            self._firsts[row], self._episode_N[row] = first, episode
            if episode == 0:
                self._ticks_N[row] = 0
        self._first_N[rows_R] = spread_B(np.array([first & _BITS for first, _ in started], np.uint64))
        self._slip_noise.seed(rows_R, self._first_N[rows_R])

    def _start(self, rows_R: NDArray[np.int64], drawn: Drawn) -> None:
        """Put new levels on the boards `rows_R`."""
        self._batch.place(rows_R, drawn)
        self._deadline_N[rows_R] = self._ticks_N[rows_R] + self._limit
        if self._reward_unfinished:
            self._goals_N[rows_R] = drawn.goals_R

    def _restart(self, restart_N: NDArray[np.bool_], rows_R: NDArray[np.int64]) -> Infos:
        """Start the next episode on the boards `rows_R`, and return the infos about the new levels."""
        self._episode_N += restart_N
        if self._level_cache.is_single:
            drawn = self._level_cache.only()
        else:
            seed_R = episode_seed_B(self._first_N[rows_R], self._episode_N[rows_R])
            drawn = self._level_cache.draw(seed_R.tolist(), spread_B(seed_R))
        self._start(rows_R, drawn)
        return self._level_infos(restart_N, rows_R, drawn.facts)

    def _end_and_restart(self, infos: Infos, ended_N: NDArray[np.bool_]) -> Infos:
        """Start the next episode on boards that have just ended. Return the step's infos with those of the restart."""
        rows_R = ended_N.nonzero()[0]
        goes_on_N = ~ended_N
        final_N = np.full(self.num_envs, None, dtype=object)
        final_N[rows_R] = list(self._batch.grids(rows_R)) if self._is_grid else [self._texts[row] for row in rows_R]
        last: Infos = {}
        following: Infos = {"success": infos["success"] & goes_on_N, "_success": self._all_N}
        for name in ("action_is_valid", "action_is_effective", "success"):
            last[name], last[f"_{name}"] = infos[name] & ended_N, ended_N
            if name != "success" and goes_on_N.any():
                following[name], following[f"_{name}"] = infos[name] & goes_on_N, goes_on_N
        last["legal_moves"], last["_legal_moves"] = self._legal(ended_N), ended_N
        following["legal_moves"], following["_legal_moves"] = self._legal_N, self._all_N
        following |= {"final_obs": final_N, "_final_obs": ended_N, "final_info": last, "_final_info": ended_N}
        following |= self._restart(ended_N, rows_R)
        if not self._is_grid:
            self._write(rows_R)
        return following

    def _step_infos(
        self,
        played_N: NDArray[np.bool_],
        num_started: int,
        valid_N: NDArray[np.bool_],
        moved_N: NDArray[np.bool_],
        won_N: NDArray[np.bool_],
    ) -> Infos:
        infos: Infos = {
            "success": won_N,
            "_success": self._all_N,
            "legal_moves": self._legal_N,
            "_legal_moves": self._all_N,
        }
        if num_started < self.num_envs:
            infos["action_is_valid"] = valid_N & played_N if num_started else valid_N
            infos["action_is_effective"] = moved_N
            infos["_action_is_valid"] = infos["_action_is_effective"] = played_N
        return infos

    def _level_infos(
        self, mask_N: NDArray[np.bool_], rows_R: NDArray[np.int64], facts: dict[str, NDArray[np.int64]]
    ) -> Infos:
        if not facts:
            return {}
        level: Infos = {}
        for name, fact_R in facts.items():
            fact_N = np.zeros(self.num_envs, np.int64)
            fact_N[rows_R] = fact_R
            level[name], level[f"_{name}"] = fact_N, mask_N
        return {"level": level, "_level": mask_N}

    def _legal(self, mask_N: NDArray[np.bool_]) -> NDArray[Any]:
        legal_N = self._legal_N.copy()
        legal_N[~mask_N] = None
        return legal_N

    def _write(self, rows_R: NDArray[np.int64]) -> None:
        for row, text in zip(rows_R.tolist(), self._boards(rows_R), strict=True):
            self._texts[row] = self._rules + text

    def _boards(self, rows_R: NDArray[np.int64] | None = None) -> list[str]:
        """Return the boards `rows_R` as texts, as observations show them. None means all boards."""
        texts = self._batch.texts(self._symbols, rows_R)
        return [spread_out(text) for text in texts] if self._defaults.spaced else texts

    def _add_texts_above(self, unread_N: NDArray[np.bool_], restart_R: NDArray[np.int64]) -> None:
        """Add a notice above boards with an unreadable answer, and the rules above boards that start an episode."""
        if self._defaults.instructions:
            for row in unread_N.nonzero()[0].tolist():
                self._texts[row] = unreadable(self._defaults.actions_per_turn) + self._texts[row]
        if self._rules:
            for row in restart_R.tolist():
                self._texts[row] = self._rules + self._texts[row]

    def _observe(self) -> Any:
        return self._batch.grids() if self._is_grid else tuple(self._texts)


class _StepArrays(NamedTuple):
    """The results of one turn on N boards."""

    reward_N: NDArray[np.float64]
    terminated_N: NDArray[np.bool_]
    truncated_N: NDArray[np.bool_]
    moved_N: NDArray[np.bool_]
    won_N: NDArray[np.bool_]


def _seeds(seed: int | Sequence[int | None] | None, num_envs: int) -> Sequence[int | None]:
    """Return the seed of each copy: the items of a sequence, or `seed`, `seed` + 1 and so on; None means no seed."""
    if isinstance(seed, (int, np.integer)):
        seed = [int(seed) + number for number in range(num_envs)]
    elif isinstance(seed, float):
        raise UsageError(f"seed: must be integers of at least 0, got {seed!r}")
    seeds: list[Any] = [None] * num_envs if seed is None else list(seed)
    if len(seeds) != num_envs:
        raise UsageError(f"seed: there are {num_envs} copies, got {len(seeds)} seeds")
    for one in seeds:
        if one is not None and (not isinstance(one, (int, np.integer)) or one < 0):
            raise UsageError(f"seed: must be integers of at least 0, got {one!r}")
    return seeds


def _mask(mask: Any, num_envs: int) -> NDArray[np.bool_]:
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise UsageError(f"reset_mask: must be an array of {num_envs} booleans, at least one of them true")
    return mask.copy()


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


_NO_ROWS = np.zeros(0, np.int64)
