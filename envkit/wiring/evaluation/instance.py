"""One instance of an environment as a host: `Instance` plays an episode in it, and keeps what it returned."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from numbers import Real
from typing import Any, NamedTuple

import gymnasium

from envkit.errors import EnvkitError
from envkit.protocols import EnvHost, Episode
from envkit.types import Observation, Options, Reset, Step, Task, Trajectory
from envkit.wiring.environments import attributed


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


class Instance(Episode, EnvHost):
    """One episode in an instance, and the host that leases it.

    `play` gets an empty text or 0 instead of an observation or reward that it cannot read.

    Args:
        env: The instance, which the caller closes.
        task: The task to play.
        options: Options that the reset gets, or None.

    Attributes:
        seen: What the instance returned.
    """

    capacity = 1

    def __init__(self, env: gymnasium.Env[Any, Any], task: Task, options: Options | None) -> None:
        self.seen: list[Seen] = []
        self._env = env
        self._task = task
        self._options = options

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[Episode]:
        yield self

    async def reset(self) -> Reset:
        options = None if self._options is None else dict(self._options)
        with attributed(self._task.env_id, "reset"):
            observation, info = self._env.reset(seed=self._task.seed, options=options)
        start = self._recorded(Seen(observation, 0.0, False, False, info))
        declared = {**info, **self._env.metadata}
        folds = declared.get("metrics")
        success = {"success": folds["success"]} if isinstance(folds, Mapping) and "success" in folds else {}
        return Reset(start.observation, {"metrics": success, "success_return": declared.get("success_return")})

    async def step(self, action: str) -> Step:
        with attributed(self._task.env_id, "step"):
            seen = Seen(*self._env.step(action))
        return self._recorded(seen)

    def _recorded(self, seen: Seen) -> Step:
        self.seen.append(seen)
        text = seen.observation if isinstance(seen.observation, str) else ""
        reward = float(seen.reward) if isinstance(seen.reward, Real) and math.isfinite(seen.reward) else 0.0
        observation = Observation(text, seen.legal_moves)
        return Step(observation, reward, bool(seen.terminated), bool(seen.truncated), dict(seen.info))


def unless_void(played: Trajectory) -> Trajectory:
    """Return an episode that is not void.

    Raises:
        EnvkitError: It is void; the message says why.
    """
    if played.is_void:
        raise EnvkitError(played.outcome.error or played.outcome.stop)
    return played
