"""Recording, replay and comparison of episodes for the checks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import gymnasium

from envkit import clock
from envkit.errors import PlayerStoppedError
from envkit.protocols import EpisodePlayer, Expert, Player, TaskExpert
from envkit.trainer_bridge.rollout import RolloutLimits, play
from envkit.trainer_bridge.rollout.players import Chooser, ScriptedPlayer
from envkit.types import JSON, Observation, Options, Reset, RolloutRequest, StopReason, Task, stable_hash
from envkit.wiring.environments import attributed, find, make_here, open_expert
from envkit.wiring.evaluation.instance import Instance, Seen, unless_void

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

_SHORT = 60


class FailedCheckError(Exception):
    """The environment violates the contract; the message says how, and what to change."""


class SkippedCheckError(Exception):
    """The check does not apply; the message says why."""


@dataclass(slots=True)
class PlayedEpisode:
    """A recorded episode.

    Attributes:
        seed: Seed of the episode.
        seen: The values that reset and each step returned.
        actions: The action of each step.
        success: Whether it succeeded; None if that is unknown.
    """

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

    Args:
        env_id: Registered environment.
        options: Options with which instances are created.
        seeds: Seeds of the recorded episodes, one episode each.

    Attributes:
        spec: Registration of the environment.
        expert: Plays part of the recorded episodes; None if no expert is registered.

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
        explorer = Explorer(self, within_s=RECORD_S)
        episodes = []
        for seed in self.seeds:
            with self.opened() as instance:
                episodes.append(self.play(instance, seed, explorer))
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
        """Play an episode of at most `most` steps in the instance `env`; the default for `player` is an `Explorer`.

        Raises:
            EnvkitError: The environment failed.
        """
        task = Task(self.env_id, seed, {**self.options, **(options or {})})
        episode = Instance(env, task, options)
        request = RolloutRequest("check-env", task, 0, stable_hash("check-env", seed))
        limits = RolloutLimits(max_turns=most)
        played = unless_void(clock.run(play, episode, player or Explorer(self), limits, request))
        actions = [turn.action for turn in played.turns]
        return PlayedEpisode(seed, episode.seen, actions, played.outcome.success)

    def replay(self, env: gymnasium.Env[Any, Any], recorded: PlayedEpisode) -> PlayedEpisode:
        """Play the seed and the actions of `recorded` again, in the instance `env`."""
        return self.play(env, recorded.seed, ScriptedPlayer([recorded.actions]))

    def best_moves(self, task: Task) -> Callable[[Observation], Sequence[str]]:
        """Return a function that returns the expert's moves in an episode of `task`; empty if there is no expert."""
        expert = self.expert.for_task(task) if isinstance(self.expert, TaskExpert) else self.expert

        def moves(observation: Observation) -> Sequence[str]:
            with attributed(self.env_id, "moves of the expert"):
                return () if expert is None or not observation.text else expert.moves(observation)

        return moves


@dataclass(frozen=True, slots=True)
class Explorer(Player):
    """Plays random legal moves, or `WORDS` if there are none. If the seed of the task is odd, most are the expert's.

    Attributes:
        env: The environment.
        within_s: Seconds after which it stops.
    """

    env: EnvUnderTest
    within_s: float = math.inf

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        rng, expert, best_moves = random.Random(request.seed), self.env.expert, self.env.best_moves(request.task)
        until = clock.stopwatch() + self.within_s
        follows_expert = request.task.seed % 2 == 1

        def choose(observation: Observation) -> str:
            if clock.stopwatch() >= until:
                raise PlayerStoppedError(StopReason.MAX_TURNS)
            if not observation.legal_moves:
                return rng.choice(WORDS)
            best = best_moves(observation) if follows_expert else ()
            is_best = follows_expert and rng.random() < 0.7 and best
            move = best[0] if is_best else rng.choice(observation.legal_moves)
            return move if expert is None else expert.answer(move)

        return Chooser(choose)


def difference(one: Sequence[Any], other: Sequence[Any]) -> str | None:
    """Return, as text, the first difference between two results of `PlayedEpisode.as_json`; None if they are equal."""
    for number, (row, other_row) in enumerate(zip(one[1:], other[1:], strict=False)):
        for name, value, expected in zip(Seen._fields, row, other_row, strict=True):
            if differs(value, expected):
                return f"seed {one[0]}, {name} of {step_name(number)}: {shown_apart(value, expected)}"
    return None if len(one) == len(other) else f"seed {one[0]}: {len(one) - 2} steps, then {len(other) - 2}"


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
