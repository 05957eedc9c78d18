"""Recording, replay and comparison of episodes that are played in one instance of an environment."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import gymnasium

from envkit import clock
from envkit.env import attributed
from envkit.errors import EnvkitError, PlayerStoppedError
from envkit.local_host import SlotHost
from envkit.protocols import EpisodePlayer, Expert, Player, expert_for
from envkit.trainer_bridge.rollout import RolloutLimits, play
from envkit.trainer_bridge.rollout.players import Chooser, ScriptedPlayer
from envkit.types import (
    JSON,
    Info,
    Observation,
    Options,
    Reset,
    RolloutRequest,
    StopReason,
    Task,
    Trajectory,
    stable_hash,
)
from envkit.wiring.environments import find, make_here, open_expert

MAX_STEPS = 200
"""Limit on the steps of a recorded episode."""

WORDS = ("1", "yes", "<answer>1</answer>", "I do not know.")
"""Actions for an environment that lists no legal moves."""

RECORD_S = 5.0
"""Seconds after which no further step of a recorded episode starts."""

NO_SUCCESS = (
    "the environment reports no success; set metadata = {'metrics': {'success': 'last'}} and put success into the info "
    "of the last step, or grade the episodes, or pass success_return to envkit.register"
)

SEEDED = (
    "draw all random values from the seed of reset, as by random.Random(stable_hash(seed)), never from global "
    "generators, hash() or the time"
)

_SHORT = 60


class FailedCheckError(Exception):
    """The environment violates the contract; the message says how, and what to change."""


class SkippedCheckError(Exception):
    """The check does not apply; the message says why."""


class Seen(NamedTuple):
    """The values that a step or reset returned; the reward of reset is 0."""

    observation: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: Info

    @property
    def legal_moves(self) -> tuple[str, ...]:
        moves = self.info.get("legal_moves")
        return tuple(map(str, moves)) if isinstance(moves, (list, tuple)) else ()


class Recorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An instance whose results are kept in `seen`. Its owner closes it."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.seen: list[Seen] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.seen.append(Seen(observation, 0.0, False, False, info))
        return observation, info

    def step(self, action: str) -> Seen:
        observation, reward, terminated, truncated, info = self.env.step(action)  # it may be an endless generator
        self.seen.append(Seen(observation, reward, terminated, truncated, info))
        return self.seen[-1]

    def close(self) -> None:
        pass


async def play_in(env: Recorder, player: Player, task: Task, max_turns: int = sys.maxsize) -> Trajectory:
    """Play an episode of `task` in an instance. Raises `EnvkitError` if the environment fails."""
    host = SlotHost(lambda env_id: env, 1)
    return unless_void(await play(host, player, RolloutLimits(max_turns=max_turns), RolloutRequest("", task, 0)))


def unless_void(played: Trajectory) -> Trajectory:
    """Return an episode that is not void. Raises `EnvkitError` with the reason for a void one."""
    if played.is_void:
        raise EnvkitError(played.outcome.error or played.outcome.stop)
    return played


@dataclass(slots=True)
class PlayedEpisode:
    """A recorded episode: what reset and each step returned, and the action of each step."""

    seed: int
    seen: list[Seen]
    actions: list[str] = field(default_factory=list)
    success: bool | None = None

    @property
    def has_ended(self) -> bool:
        return bool(self.seen[-1].terminated or self.seen[-1].truncated)

    def as_json(self) -> list[JSON]:
        """Return the seed and all of `seen` as JSON values."""
        seen: list[JSON] = json.loads(json.dumps([self.seed, *map(list, self.seen)], default=_plain))
        return seen


class EnvUnderTest:
    """Creates and plays instances of one environment. Exceptions of the environment become `EnvError`s.

    Instances are created with `options`. One episode is recorded for each of the `seeds`; the expert, if one is
    registered, plays part of them.

    Raises:
        UnknownEnvError, OptionError: The environment is not registered, or its expert rejects an option.
    """

    def __init__(self, env_id: str, options: Options, seeds: Sequence[int]) -> None:
        self.env_id = env_id
        self.options = dict(options)
        self.seeds = seeds
        self.spec = find(env_id)
        self.expert: Expert | None = None if self.spec.expert is None else open_expert(env_id, options)

    @contextmanager
    def opened(self, options: Options | None = None) -> Iterator[gymnasium.Env[Any, Any]]:
        """Create an instance for the duration of a ``with`` block; `options`, if given, replace ``self.options``."""
        with attributed(self.env_id, "__init__"):
            env = make_here(self.env_id, self.options if options is None else options)
        with closing(env):
            yield env

    @cached_property
    def episodes(self) -> list[PlayedEpisode]:
        """The recorded episodes: one episode per seed, each in its own instance."""
        episodes = []
        for seed in self.seeds:
            with self.opened() as instance:
                episodes.append(self.play(instance, seed, Explorer(self, within_s=RECORD_S)))
        return episodes

    def play(
        self,
        env: gymnasium.Env[Any, Any],
        seed: int,
        player: Player | None = None,
        *,
        options: Options | None = None,
        most: int = MAX_STEPS,
    ) -> PlayedEpisode:
        """Play an episode of at most `most` steps in the instance `env`; the default for `player` is an `Explorer`."""
        recorder, task = Recorder(env), Task(self.env_id, seed, options or {})
        played = clock.run_blocking(partial(play_in, recorder, player or Explorer(self), task, most))
        return PlayedEpisode(seed, recorder.seen, [turn.action for turn in played.turns], played.outcome.success)

    def replay(self, env: gymnasium.Env[Any, Any], recorded: PlayedEpisode) -> PlayedEpisode:
        """Play the seed and the actions of `recorded` again, in the instance `env`."""
        return self.play(env, recorded.seed, ScriptedPlayer([recorded.actions]))


@dataclass(frozen=True, slots=True)
class Explorer(Player):
    """Plays random legal moves, or `WORDS` if there are none. If the seed of the task is odd, most are the expert's.

    Attributes:
        within_s: Seconds after which it stops.
        only_expert: Whether all moves are the expert's, and it stops where the expert knows none.
    """

    env: EnvUnderTest
    within_s: float = math.inf
    only_expert: bool = False

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        task, expert, rng = request.task, self.env.expert, random.Random(stable_hash("check-env", request.task.seed))
        playing = None if expert is None else expert_for(expert, task)
        until = clock.stopwatch() + self.within_s
        share = 1.0 if self.only_expert else 0.7 if task.seed % 2 == 1 else 0.0

        def choose(observation: Observation) -> str:
            moves, best = observation.legal_moves, tuple[str, ...]()
            if playing is not None and share and observation.text:
                with attributed(task.env_id, "moves of the expert"):
                    best = tuple(playing.moves(observation))
            if clock.stopwatch() >= until or (self.only_expert and not best):
                raise PlayerStoppedError(StopReason.MAX_TURNS)
            if self.only_expert and moves and not set(best) <= set(moves):
                raise EnvkitError(f"the expert plays {best[0]!r}, which is not in legal_moves: {', '.join(moves)}")
            if not moves and not self.only_expert:
                return rng.choice(WORDS)
            move = best[0] if share and rng.random() < share and best else rng.choice(moves)
            return move if expert is None else expert.answer(move)

        return Chooser(choose)


def require_same(one: Sequence[Any], other: Sequence[Any], problem: str, remedy: str) -> None:
    """Fail with the problem, the place and the remedy if two results of `PlayedEpisode.as_json` differ."""
    places = [
        f"{name} of {step_name(number)}: {shown_apart(value, expected)}"
        for number, (row, other_row) in enumerate(zip(one[1:], other[1:], strict=False))
        for name, value, expected in zip(Seen._fields, row, other_row, strict=True)
        if differs(value, expected)
    ]
    if len(one) != len(other):
        places.append(f"{len(one) - 2} steps, then {len(other) - 2}")
    if places:
        raise FailedCheckError(f"{problem} (seed {one[0]}, {places[0]}); {remedy}")


def differs(value: object, other: object) -> bool:
    """Whether two values differ; two NaNs count as equal."""
    return value != other and repr(value) != repr(other)


def step_name(number: int) -> str:
    """Return the name of step `number` for a message; ``"reset"`` for 0."""
    return f"step {number}" if number else "reset"


def shown_apart(value: object, other: object) -> str:
    """Return two values as texts, each cut to the part around their first difference."""
    one, two = (text if isinstance(text, str) else json.dumps(text, default=str) for text in (value, other))
    at = next((where for where, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    start = max(0, at - 20)
    return f"{shown(one[start:])}, then {shown(two[start:])}"


def shown(value: object) -> str:
    """Return the `repr` of a value, cut after `_SHORT` characters."""
    text = repr(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def _plain(value: Any) -> object:
    """Convert a value that JSON does not support, such as a NumPy value, to a JSON value."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
