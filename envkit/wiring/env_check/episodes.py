"""Episodes that are recorded, replayed and compared."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from envkit.protocols import Expert
from envkit.types import JSON, Observation, Options, stable_hash
from envkit.wiring.envs import attributed, find, make_here, open_expert

MAX_STEPS = 200
"""Steps after which a recorded episode is cut off."""

WORDS = ("1", "yes", "<answer>1</answer>", "I do not know.")
"""Actions for an environment that lists no legal moves."""

_NAMES = ("observation", "reward", "terminated", "truncated", "info")
_SHORT = 60


@dataclass(slots=True)
class Played:
    """An episode.

    Attributes:
        seed: Its seed.
        start: First observation, and the info of reset.
        actions: What was played.
        steps: What each step returned: observation, reward, terminated, truncated, info.
    """

    seed: int
    start: tuple[Any, Mapping[str, Any]]
    actions: list[str] = field(default_factory=list)
    steps: list[tuple[Any, Any, Any, Any, Mapping[str, Any]]] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return bool(self.steps) and bool(self.steps[-1][2] or self.steps[-1][3])

    def as_json(self) -> list[JSON]:
        """Return everything that was seen, as what JSON can say."""
        text = json.dumps([self.seed, [*self.start], [list(step) for step in self.steps]], default=_plain)
        seen: list[JSON] = json.loads(text)
        return seen


class EnvUnderTest:
    """Makes and plays instances of one environment; what they raise is an `EnvError` with its place.

    Args:
        env_id: Registered environment.
        options: What it is made with.

    Attributes:
        expert: Plays part of the recorded episodes; None where none is registered.

    Raises:
        UnknownEnvError, OptionError: There is no such environment, or its expert refuses an option.
    """

    def __init__(self, env_id: str, options: Options) -> None:
        self.env_id = env_id
        self.options = dict(options)
        self.expert: Expert | None = None if find(env_id).expert is None else open_expert(env_id, options)

    @contextmanager
    def opened(self, options: Options | None = None) -> Iterator[gymnasium.Env[Any, Any]]:
        """Make an instance for the length of the block, with `options` instead of the usual ones."""
        with attributed(self.env_id, "__init__"):
            env = make_here(self.env_id, self.options if options is None else options)
        with closing(env):
            yield env

    def record(
        self, env: gymnasium.Env[Any, Any], seed: int, *, options: Options | None = None, most: int = MAX_STEPS
    ) -> Played:
        """Play `most` steps at most: legal moves, in every other episode mostly the expert's, else `WORDS`."""
        rng = random.Random(stable_hash("check-env", seed))
        played = self._begin(env, seed, options)
        observation, info = played.start
        while len(played.steps) < most and not played.has_ended:
            action = self._action(observation, info, rng, asks_expert=seed % 2 == 1)
            self.step(env, action, played)
            observation, info = played.steps[-1][0], played.steps[-1][4]
        return played

    def replay(self, env: gymnasium.Env[Any, Any], recorded: Played) -> Played:
        """Play the same actions from the same seed."""
        played = self._begin(env, recorded.seed, None)
        for action in recorded.actions:
            if played.has_ended:
                break
            self.step(env, action, played)
        return played

    def step(self, env: gymnasium.Env[Any, Any], action: str, played: Played) -> None:
        """Play one action, and add it to `played`."""
        with attributed(self.env_id, "step"):
            observation, reward, terminated, truncated, info = env.step(action)
        played.actions.append(action)
        played.steps.append((observation, reward, terminated, truncated, info))

    def _begin(self, env: gymnasium.Env[Any, Any], seed: int, options: Options | None) -> Played:
        with attributed(self.env_id, "reset"):
            observation, info = env.reset(seed=seed, options=None if options is None else dict(options))
        return Played(seed, (observation, info))

    def _action(self, observation: object, info: Mapping[str, Any], rng: random.Random, *, asks_expert: bool) -> str:
        legal = moves_of(info)
        if not legal:
            return rng.choice(WORDS)
        if self.expert is None:
            return rng.choice(legal)
        best: Sequence[str] = ()
        if asks_expert and isinstance(observation, str) and rng.random() < 0.7:
            with attributed(self.env_id, "moves of the expert"):
                best = self.expert.moves(Observation(observation, legal))
        return self.expert.answer(best[0] if best else rng.choice(legal))


def moves_of(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the legal moves that an info lists."""
    moves = info.get("legal_moves")
    return tuple(map(str, moves)) if isinstance(moves, (list, tuple)) else ()


def difference(one: Sequence[Any], other: Sequence[Any]) -> str | None:
    """Say where two episodes, as `Played.as_json` returns them, differ first; None if they do not."""
    (seed, start, steps), (_, other_start, other_steps) = one, other
    for name, value, wanted in zip(("observation", "info"), start, other_start, strict=True):
        if value != wanted and repr(value) != repr(wanted):  # NaN equals nothing
            return f"seed {seed}, {name} of reset: {shown_apart(value, wanted)}"
    for number, (step, other_step) in enumerate(zip(steps, other_steps, strict=False), start=1):
        for name, value, wanted in zip(_NAMES, step, other_step, strict=True):
            if value != wanted and repr(value) != repr(wanted):
                return f"seed {seed}, {name} of step {number}: {shown_apart(value, wanted)}"
    if len(steps) != len(other_steps):
        return f"seed {seed}: {len(steps)} steps, then {len(other_steps)}"
    return None


def shown_apart(value: object, other: object) -> str:
    """Return two values, cut to where they differ first."""
    one, two = (text if isinstance(text, str) else json.dumps(text, default=str) for text in (value, other))
    at = next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    start = max(0, at - 20)
    return f"{shown(one[start:])}, then {shown(two[start:])}"


def shown(value: object) -> str:
    """Return a value as Python writes it, cut to a few words."""
    text = repr(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def _plain(value: Any) -> object:
    """Return what JSON can say of values that it cannot, such as NumPy's."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
