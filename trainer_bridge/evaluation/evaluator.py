"""Evaluation of the policy during a training run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from envkit.protocols import Engine
from envkit.runs.display import Display
from envkit.types import Task, Trajectory

from ..agents.episode import AgentPlayer
from ..rollout import PolicyPlayer
from ..scheduler import Rollout, RolloutResult


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Measures the policy's success on fixed held-out tasks, with the same sampling seed at every evaluation.

    Each task is played `attempts` times with completions sampled at `temperature`, and once greedily. `names` has the
    environment of each task, for metrics per environment; empty for no such metrics.
    """

    rollout: Rollout
    tasks: Sequence[Task]
    temperature: float
    seed: int
    attempts: int = 1
    names: Sequence[str] = ()

    async def run(self, display: Display, step: int, engine: Engine | None = None) -> dict[str, float]:
        """Play all tasks after train step `step`, sampled and greedily; return the metrics, if there are tasks.

        `engine` has the weights of the train step; None: the engine that the policy plays with.

        eval_success, eval_return and eval_turns are means over the valid sampled episodes; eval_greedy is the success
        of greedy play; eval_episodes is the number of valid sampled episodes. Metrics such as
        ``eval_success/FrozenLake-v0`` have the same meaning for one of several environments.
        """
        if not self.tasks:
            return {}
        rollout = self.rollout
        if engine is not None:
            assert isinstance(rollout.player, (PolicyPlayer, AgentPlayer)), "only a policy has an engine"
            rollout = replace(rollout, player=replace(rollout.player, engine=engine))
        display.phase("evaluate", (self.attempts + 1) * len(self.tasks))

        def count(trajectory: Trajectory) -> None:
            display.advance(0 if trajectory.is_void else 1)

        play = partial(rollout.groups, self.tasks, seed=self.seed, on_episode=count)
        sampled = await play(self.attempts, phase=f"eval-{step}-sampled", temperature=self.temperature)
        greedy = await play(phase=f"eval-{step}-greedy", temperature=0.0)
        values = _evaluated(sampled, greedy)
        if not self.names:
            return values
        greedy_parts = greedy.by_name(self.names.__getitem__)
        for name, part in sampled.by_name(self.names.__getitem__).items():
            values |= {f"{key}/{name}": value for key, value in _evaluated(part, greedy_parts[name]).items()}
        return values


def _evaluated(sampled: RolloutResult, greedy: RolloutResult) -> dict[str, float]:
    played = valid(sampled.trajectories)
    return {
        "eval_success": success_of(played),
        "eval_greedy": success_of(valid(greedy.trajectories)),
        "eval_return": return_of(played),
        "eval_turns": mean([len(one.turns) for one in played]),
        "eval_episodes": float(len(played)),
    }


def valid(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories that are not void."""
    return [one for one in trajectories if not one.is_void]


def success_of(trajectories: Sequence[Trajectory]) -> float:
    """Return the share of successful episodes among those whose success is known; NaN if none is."""
    return mean([float(one.outcome.success) for one in trajectories if one.outcome.success is not None])


def return_of(trajectories: Sequence[Trajectory]) -> float:
    """Return the mean return of valid episodes; NaN without episodes."""
    return mean([one.outcome.reward for one in trajectories if one.outcome.reward is not None])


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values."""
    return math.fsum(values) / len(values) if values else math.nan
