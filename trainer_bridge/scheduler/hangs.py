"""Hangs: whether an action made its environment hang, or the machine did."""

from __future__ import annotations

from envkit.protocols import EnvHost
from envkit.types import RolloutRequest, StopReason, Trajectory

from ..rollout.episode import RolloutLimits, play
from ..rollout.players import ScriptedPlayer

_REPLAYS = 2
"""Number of fresh places in which an episode is played again."""


def hung_in_step(trajectory: Trajectory) -> bool:
    """Return whether an episode is void because its last action got no answer in time."""
    is_late = trajectory.outcome.stop is StopReason.TIMEOUT
    return is_late and bool(trajectory.turns) and trajectory.turns[-1].step is None


async def hangs_again(trajectory: Trajectory, host: EnvHost, limits: RolloutLimits) -> bool:
    """Play the actions of an episode that hung in a step again, without the engine, in fresh places.

    Returns:
        Whether all give the same observations and hang at the same step.
    """
    # An episode that goes on after the actions is void, so that nothing grades it.
    player = ScriptedPlayer([[turn.action for turn in trajectory.turns]], stop=StopReason.ABORTED)
    for number in range(_REPLAYS):
        request = RolloutRequest(f"{trajectory.session}/replay-{number}", trajectory.task, trajectory.member)
        replay = await play(host, player, limits, request)
        if not hung_in_step(replay) or _observed(replay) != _observed(trajectory):
            return False
    return True


def _observed(trajectory: Trajectory) -> list[str | None]:
    """Return the text of each observation; None for a step without an answer."""
    start = None if trajectory.start is None else trajectory.start.observation.text
    return [start, *(None if turn.step is None else turn.step.observation.text for turn in trajectory.turns)]
