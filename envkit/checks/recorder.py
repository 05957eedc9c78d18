"""Episodes in one instance of an environment: `play_in` plays them, a `Recorder` keeps what the instance returned."""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import Any, NamedTuple

import gymnasium

from envkit.errors import EnvkitError
from envkit.protocols import Player
from envkit.trainer_bridge.rollout import RolloutLimits, play
from envkit.types import Info, RolloutRequest, Task, Trajectory
from envkit.vector import SlotHost


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
    """An instance whose results are kept in `seen`. Its owner closes it.

    The caller gets an empty text or 0 for what is no text or finite number.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.seen: list[Seen] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._readable(Seen(observation, 0.0, False, False, info)).observation, info

    def step(self, action: str) -> Seen:
        return self._readable(Seen(*self.env.step(action)))

    def close(self) -> None:
        pass

    def _readable(self, seen: Seen) -> Seen:
        self.seen.append(seen)
        is_number = isinstance(seen.reward, Real) and math.isfinite(seen.reward)
        text = seen.observation if isinstance(seen.observation, str) else ""
        return seen._replace(observation=text, reward=seen.reward if is_number else 0.0)


async def play_in(env: Recorder, player: Player, task: Task, max_turns: int = sys.maxsize) -> Trajectory:
    """Play an episode of `task` in an instance.

    Raises:
        EnvkitError: The environment failed.
    """
    host = SlotHost(lambda env_id: env, 1)
    return unless_void(await play(host, player, RolloutLimits(max_turns=max_turns), RolloutRequest("", task, 0)))


def unless_void(played: Trajectory) -> Trajectory:
    """Return an episode that is not void.

    Raises:
        EnvkitError: It is void; the message says why.
    """
    if played.is_void:
        raise EnvkitError(played.outcome.error or played.outcome.stop)
    return played
