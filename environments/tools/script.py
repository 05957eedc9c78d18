"""A player that plays a fixed list of actions, for oracles and cheats of environments with tools."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from envkit.protocols import EpisodePlayer
from envkit.types import JSON, Observation, Reset, Task


def write_call(name: str, **arguments: JSON) -> str:
    """Return the action that calls a tool, in the canonical form of `parse_call`."""
    return json.dumps({"name": name, "arguments": arguments})


class Script:
    """Plays the same actions in every episode, whatever it observes; see `envkit.protocols.Player`.

    After the last action, it repeats it. To play actions that depend on the task, return a script from the `begin` of
    another player: ``return Script(actions).begin(task, start, rng)``.

    Args:
        actions: The actions, at least one.
    """

    def __init__(self, actions: Sequence[str]) -> None:
        if not actions:
            raise ValueError("a script needs at least one action")
        self._actions = tuple(actions)

    def begin(self, task: Task, start: Reset, rng: random.Random) -> EpisodePlayer:
        return _Reading(self._actions)


class _Reading:
    def __init__(self, actions: Sequence[str]) -> None:
        self._left = list(actions)

    @property
    def generation(self) -> None:
        return None

    async def act(self, observation: Observation) -> str:
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]
