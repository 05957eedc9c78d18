"""An environment played by a person: `Game` plays one level after another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import gymnasium

from envkit.errors import UsageError
from envkit.protocols import Expert, TaskExpert
from envkit.trainer_bridge.evaluation.outcomes import shortest_of
from envkit.types import Info, Observation, Options, Task
from envkit.wiring.environments import attributed, make, make_here, open_expert
from envkit.wiring.evaluation.players import ANY_SPLIT, spec_of, with_split

SOLVED = "solved"
LOST = "lost"
OUT_OF_MOVES = "out of moves"
OVER = "over"

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Scene:
    """State of an episode, as shown to a person. A value that the environment does not report is None.

    Attributes:
        seed: Seed of the level.
        text: The observation.
        drawing: The environment's own rendering: text with ANSI colours, or an HTML document.
        notes: Lines of the observation that are not in the drawing, such as the rules in the first observation. Empty
            if there is no drawing.
        legal_moves: Names of the legal moves; empty if the environment does not list them.
        turns: Number of actions so far.
        total: Sum of the rewards so far.
        shortest: Number of moves of the level's shortest solution.
        reward: Reward of the last action; None before the first action.
        is_valid: Whether the last action was valid.
        is_effective: Whether the last action changed anything.
        end: `SOLVED`, `LOST`, `OUT_OF_MOVES`, or `OVER` if success is not reported; None while the episode runs.
    """

    seed: int
    text: str
    drawing: str | None
    notes: str
    legal_moves: tuple[str, ...]
    turns: int = 0
    total: float = 0.0
    shortest: int | None = None
    reward: float | None = None
    is_valid: bool | None = None
    is_effective: bool | None = None
    end: str | None = None


class Game:
    """A game in an environment, created by `open_game`.

    Args:
        env: The environment, with text actions and observations.
        env_id: Id of the environment.
        expert: Gives hints and formats moves as answers; None if the environment has no expert.
        options: Options of every episode.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], env_id: str, *, expert: Expert | None = None, options: Options | None = None
    ) -> None:
        self.env_id = env_id
        self._env = env
        self._expert = self._playing = expert
        self._options = dict(options or {})
        self._scene: Scene | None = None
        self._unasked: list[Observation] = []

    @property
    def has_expert(self) -> bool:
        """Whether hints are available."""
        return self._expert is not None

    @property
    def scene(self) -> Scene:
        """The current state; do not read this property before the first call of `begin`."""
        assert self._scene is not None, "begin comes first"
        return self._scene

    def begin(self, seed: int) -> Scene:
        """Start the level that `seed` selects.

        Raises:
            OptionError: The environment rejects an option.
            EnvError: The environment raised an exception.
        """
        with attributed(self.env_id, "reset"):
            text, info = self._env.reset(seed=seed, options=dict(self._options))
        if isinstance(self._expert, TaskExpert):
            self._playing = self._expert.for_task(Task(self.env_id, seed, self._options))
        drawing, notes = self._drawn(text)
        self._scene = Scene(seed, text, drawing, notes, _moves(info), shortest=shortest_of(info))
        self._unasked = [Observation(text, self._scene.legal_moves)]
        return self._scene

    def act(self, action: str) -> Scene:
        """Play `action`, unchanged, and return the new state.

        Raises:
            EnvError: The environment raised an exception.
        """
        before = self.scene
        with attributed(self.env_id, "step"):
            text, reward, terminated, truncated, info = self._env.step(action)
        drawing, notes = self._drawn(text)
        self._scene = replace(
            before,
            text=text,
            drawing=drawing,
            notes=notes,
            legal_moves=_moves(info),
            turns=before.turns + 1,
            total=before.total + float(reward),
            reward=float(reward),
            is_valid=_truth(info, "action_is_valid"),
            is_effective=_truth(info, "action_is_effective"),
            end=_end(_truth(info, "success"), terminated=bool(terminated), truncated=bool(truncated)),
        )
        self._unasked.append(Observation(text, self._scene.legal_moves))
        return self._scene

    def answer(self, text: str) -> str:
        """Return the action for typed `text`. The expert formats the name of a legal move; other text is unchanged."""
        move = next((move for move in self.scene.legal_moves if move.lower() == text.strip().lower()), None)
        if move is None:
            return text
        return move if self._expert is None else self._expert.answer(move)

    def hint(self) -> Sequence[str]:
        """Return the expert's best moves; empty if the expert finds no move, or if there is no expert."""
        if self._playing is None:
            return ()
        # An expert of a task needs every observation.
        asked = self._unasked if isinstance(self._expert, TaskExpert) else self._unasked[-1:]
        self._unasked = self._unasked[-1:]
        return [self._playing.moves(observation) for observation in asked][-1]

    def _drawn(self, text: str) -> tuple[str | None, str]:
        """Return the environment's rendering, and the part of the observation that is not in the rendering."""
        with attributed(self.env_id, "render"):
            drawing = None if self._env.render_mode is None else self._env.render()
        if not isinstance(drawing, str) or not drawing.strip():
            return None, ""
        return drawing, text.rstrip().removesuffix(_COLOURS.sub("", drawing).rstrip()).strip()


@contextmanager
def open_game(
    env_id: str, *, options: Options, split: str = ANY_SPLIT, url: str | None = None, render_mode: str = "ansi"
) -> Iterator[Game]:
    """Open an environment for a person.

    Args:
        env_id: Registered environment.
        options: Options of every episode.
        split: Split whose levels are played; ``"any"`` plays all levels.
        url: Address of an `envkit serve`; None plays in this process. Drawings exist only in this process.
        render_mode: ``"ansi"`` or ``"html"``. If the environment does not have this mode, there are no drawings.

    Raises:
        UnknownEnvError: No such environment.
        OptionError: The environment or its expert rejects an option. With `url`, the environment does in `Game.begin`.
        EnvError: The environment raised an exception.
        UsageError: The environment has no such split.
        UnreachableError: The server does not answer.
    """
    spec = spec_of(env_id, url)
    splits = () if spec is None else spec.splits
    if split != ANY_SPLIT and not splits:
        raise UsageError(f"--split: {env_id} has no splits; leave it out")
    chosen = with_split(options, split, splits)
    expert = None if spec is None or spec.expert is None else open_expert(env_id, chosen)
    with closing(_open_env(env_id, chosen, url, render_mode)) as env:
        yield Game(env, env_id, expert=expert, options=chosen)


def _open_env(env_id: str, options: Options, url: str | None, render_mode: str) -> gymnasium.Env[Any, Any]:
    if url is not None:
        return make(env_id, url=url)
    # Pass the options here as well as to every reset, because an environment may accept some only in __init__.
    with attributed(env_id, "__init__"):
        env = make_here(env_id, options)
        if render_mode not in env.metadata.get("render_modes", ()):
            return env
        env.close()
        return make_here(env_id, {**options, "render_mode": render_mode})


def _moves(info: Info) -> tuple[str, ...]:
    moves = info.get("legal_moves")
    return tuple(str(move) for move in moves) if isinstance(moves, (list, tuple)) else ()


def _truth(info: Info, name: str) -> bool | None:
    value = info.get(name)
    return bool(value) if isinstance(value, (bool, int, float)) else None


def _end(success: bool | None, *, terminated: bool, truncated: bool) -> str | None:
    if not terminated and not truncated:
        return None
    if success:
        return SOLVED
    if not terminated:
        return OUT_OF_MOVES
    return OVER if success is None else LOST
