"""A player that plays a fixed list of actions, for oracles and cheats of environments with tools."""

from __future__ import annotations

import json
from collections.abc import Sequence

from envkit.protocols import EpisodePlayer, Player
from envkit.types import JSON, Observation, Reset, RolloutRequest


def write_call(name: str, **arguments: JSON) -> str:
    """Return the action that calls a tool, in the canonical form of `parse_call`."""
    return json.dumps({"name": name, "arguments": arguments})


class Script(Player):
    """Plays the same actions in every episode, whatever it observes.

    After the last action, it repeats it. To play actions that depend on the task, return a script from the `begin` of
    another player: ``return Script(actions).begin(request, start)``.

    Args:
        actions: The actions, at least one.
    """

    def __init__(self, actions: Sequence[str]) -> None:
        if not actions:
            raise ValueError("a script needs at least one action")
        self._actions = tuple(actions)

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        return _Reading(self._actions)


class _Reading(EpisodePlayer):
    def __init__(self, actions: Sequence[str]) -> None:
        self._left = list(actions)

    async def act(self, observation: Observation) -> str:
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]
