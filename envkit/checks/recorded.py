"""Recording, replay and comparison of episodes for the checks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import gymnasium

from envkit import clock
from envkit.protocols import Expert, TaskExpert
from envkit.types import JSON, Observation, Options, Task, stable_hash
from envkit.wiring.environments import attributed, find, make_here, open_expert

MAX_STEPS = 200
"""Limit on the steps of a recorded episode."""

WORDS = ("1", "yes", "<answer>1</answer>", "I do not know.")
"""Actions for an environment that lists no legal moves."""

RECORD_S = 5.0
"""Seconds after which no further step of a recorded episode starts."""

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
    info: Mapping[str, Any]

    @property
    def legal_moves(self) -> tuple[str, ...]:
        moves = self.info.get("legal_moves")
        return tuple(map(str, moves)) if isinstance(moves, (list, tuple)) else ()


Choose = Callable[[Seen], str | None]
"""Chooses an action, given the values that the last step or reset returned. Returning None ends the episode."""


@dataclass(slots=True)
class PlayedEpisode:
    """A recorded episode.

    Attributes:
        seed: Seed of the episode.
        seen: The values that reset and each step returned.
        actions: The action of each step.
    """

    seed: int
    seen: list[Seen]
    actions: list[str] = field(default_factory=list)

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
        self._playing = self.expert

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
                episodes.append(self.play(instance, seed, within_s=RECORD_S))
        return episodes

    def play(
        self,
        env: gymnasium.Env[Any, Any],
        seed: int,
        choose: Choose | None = None,
        *,
        options: Options | None = None,
        most: int = MAX_STEPS,
        within_s: float = math.inf,
    ) -> PlayedEpisode:
        """Play an episode of at most `most` steps in the instance `env`; no step starts after `within_s` seconds.

        Without `choose`, actions are random legal moves; if the seed is odd, most are the expert's moves. If the
        environment lists no legal moves, actions come from `WORDS`.
        """
        choose = choose or self._default_choice(seed)
        with attributed(self.env_id, "reset"):
            observation, info = env.reset(seed=seed, options=None if options is None else dict(options))
        if isinstance(self.expert, TaskExpert):
            self._playing = self.expert.for_task(Task(self.env_id, seed, {**self.options, **(options or {})}))
        played = PlayedEpisode(seed, [Seen(observation, 0.0, False, False, info)])
        until = clock.stopwatch() + within_s
        while len(played.actions) < most and not played.has_ended and clock.stopwatch() < until:
            action = choose(played.seen[-1])
            if action is None:
                break
            with attributed(self.env_id, "step"):
                played.seen.append(Seen(*env.step(action)))
            played.actions.append(action)
        return played

    def replay(self, env: gymnasium.Env[Any, Any], recorded: PlayedEpisode) -> PlayedEpisode:
        """Play the seed and the actions of `recorded` again, in the instance `env`."""
        actions = iter(recorded.actions)
        return self.play(env, recorded.seed, lambda seen: next(actions, None))

    def best_moves(self, seen: Seen) -> Sequence[str]:
        """Return the expert's moves in the episode that `play` started last; empty if there is no expert."""
        if self._playing is None or not isinstance(seen.observation, str):
            return ()
        with attributed(self.env_id, "moves of the expert"):
            return self._playing.moves(Observation(seen.observation, seen.legal_moves))

    def _default_choice(self, seed: int) -> Choose:
        rng = random.Random(stable_hash("check-env", seed))

        def choose(seen: Seen) -> str:
            if not seen.legal_moves:
                return rng.choice(WORDS)
            best = self.best_moves(seen) if seed % 2 == 1 else ()
            move = best[0] if seed % 2 == 1 and rng.random() < 0.7 and best else rng.choice(seen.legal_moves)
            return move if self.expert is None else self.expert.answer(move)

        return choose


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
