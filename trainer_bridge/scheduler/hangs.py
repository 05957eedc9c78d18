"""Hangs: whether an action made its environment hang, or the machine did.

The actions of the episode are played again, without the engine, in two fresh places. Only if both give the same
observations and hang at the same step, while other episodes of the environment go on, the action is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from envkit.errors import PlayerStoppedError
from envkit.protocols import EnvHost, EpisodePlayer, Player
from envkit.types import Observation, Outcome, Reset, RolloutRequest, StopReason, Trajectory

from ..rollout.episode import RolloutLimits, play
from ..rollout.players import Chooser

_REPLAYS = 2
"""Number of fresh places in which an episode is played again."""


def hung_in_step(trajectory: Trajectory) -> bool:
    """Return whether an episode is void because its last action got no answer in time."""
    is_late = trajectory.outcome.stop is StopReason.TIMEOUT
    return is_late and bool(trajectory.turns) and trajectory.turns[-1].step is None


async def failed_if_its_action_hangs(
    trajectory: Trajectory, host: EnvHost, limits: RolloutLimits, steps_of_others: Callable[[], int]
) -> Trajectory:
    """Return the episode as a failure if its last action hangs again, and as it was otherwise.

    Args:
        trajectory: An episode that hung in a step.
        host: Leases the places of the replays.
        limits: Limits of the episode.
        steps_of_others: Returns a number that grows with the steps of other episodes of the environment.
    """
    player = _Replay([turn.action for turn in trajectory.turns])
    before = steps_of_others()
    for number in range(_REPLAYS):
        request = RolloutRequest(f"{trajectory.session}/replay-{number}", trajectory.task, trajectory.member)
        replay = await play(host, player, limits, request)
        if not hung_in_step(replay) or _observed(replay) != _observed(trajectory):
            return trajectory
    if steps_of_others() == before:
        return trajectory
    reward = sum(turn.step.reward for turn in trajectory.turns if turn.step is not None)
    declared = {} if trajectory.start is None else trajectory.start.info.get("metrics")
    metrics = {"success": 0.0} if isinstance(declared, dict) and "success" in declared else {}
    return replace(trajectory, outcome=Outcome.score(StopReason.HUNG, reward, metrics))


@dataclass(frozen=True, slots=True)
class _Replay(Player):
    """Plays given actions; an episode that goes on after them is void, so that nothing grades it."""

    actions: Sequence[str]

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        left = iter(self.actions)

        def choose(observation: Observation) -> str:
            if (action := next(left, None)) is None:
                raise PlayerStoppedError(StopReason.ABORTED)
            return action

        return Chooser(choose)


def _observed(trajectory: Trajectory) -> list[str | None]:
    """Return the text of each observation; None for a step without an answer."""
    start = None if trajectory.start is None else trajectory.start.observation.text
    return [start, *(None if turn.step is None else turn.step.observation.text for turn in trajectory.turns)]
