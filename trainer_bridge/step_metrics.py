"""The metrics of a train step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from envkit.metrics import pass_at_group
from envkit.types import Sample, StopReason, Trajectory

from .evaluation.evaluator import mean, return_of, success_of, valid
from .scheduler import RolloutResult
from .scheduler.accounting import Stage
from .scheduler.pace import Batch
from .scheduler.staleness import lags


def step_metrics(result: RolloutResult, report: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of one train step: those of the rollout `result`, the trainer's `report`, and durations.

    Only metrics whose names end in ``_s`` depend on the speed of the machine.
    """
    played = [one for one in valid(result.trajectories) if not one.is_filtered]
    tokens = sum(len(turn.new_ids) + len(turn.completion.token_ids) for one in played for turn in one.turns)
    metrics = [one.outcome.values for one in played]
    folded = {name: mean([one[name] for one in metrics if name in one]) for name in sorted({*chain(*metrics)})}
    lost = [one.outcome for one in result.void]
    versions = [version for one in played for turn in one.turns for version, _ in turn.completion.versions]
    return {
        "success": success_of(played),
        "pass_at_group": pass_at_group(
            [
                [one.outcome.success is True for one in group.trajectories]
                for group in result.groups
                # Leave out groups with a void or filtered episode, because they have fewer attempts at their task.
                if not any(one.outcome.success is None or one.is_filtered for one in group.trajectories)
            ]
        ),
        **folded,
        "return": return_of(played),
        "episode_turns": mean([len(one.turns) for one in played]),
        "episodes": float(len(played)),
        "lost_episodes": float(len(result.void)),
        "lost_by_agent": float(sum(one.cause is not None and one.cause.by_agent for one in lost)),
        "cut_completions": cut_completions(played),
        "empty_actions": empty_actions(played),
        "tokens": float(tokens),
        "policy_version": float(max(versions, default=0)),
        **report,
        **seconds,
        "tokens_per_s": tokens / max(seconds.get("rollout_s", 0.0) + seconds.get("update_s", 0.0), 1e-9),
    }


def schedule_metrics(
    batch: Batch, samples: Sequence[Sample], before: Mapping[str, int], after: Mapping[str, int], *, updates: float
) -> dict[str, float]:
    """Return what became of the attempts since the train step before, and how old the tokens of the batch are.

    `before` and `after` are `Ledger.counts` after the train step before and after this one, which had `updates`.
    """
    levels = {stage.value for stage in Stage}
    counts = {
        name: count if name.removeprefix("tokens_") in levels else count - before.get(name, 0)
        for name, count in after.items()
    }
    lag_N = lags(samples, batch.version)
    lag_max = float(max(lag_N, default=0))
    return {
        **{name if name.startswith("tokens_") else f"episodes_{name}": float(count) for name, count in counts.items()},
        "groups_filtered": float(len(batch.filtered)),
        "groups_missing": float(batch.wanted - len(batch.groups)),
        **(
            {
                "lag_mean": mean(lag_N.tolist()),
                "lag_max": lag_max,
                "lag_updates_max": lag_max * updates + max(updates - 1, 0.0),
            }
            if len(lag_N)
            else {}
        ),
        **{f"lag_share_{lag}": float(count) / len(lag_N) for lag, count in enumerate(np.bincount(lag_N)) if count},
    }


def waiting_metrics(batch: Batch, seconds: float) -> dict[str, float]:
    """Return how long the attempts of a batch waited for each part together, and who was busy.

    The train step took `seconds`, with the wait for the batch.
    """
    turns = [turn for one in batch.attempts for turn in one.turns]
    return {
        "waiting_place_s": sum(one.queue_s for one in batch.attempts),
        "waiting_environment_s": sum(one.reset_s for one in batch.attempts) + sum(turn.step_s for turn in turns),
        "waiting_engine_s": sum(turn.generate_s for turn in turns),
        "waiting_gate_s": sum(turn.wait_s for turn in turns),
        "waiting_grader_s": sum(one.grade_s for one in batch.attempts),
        "group_mean_s": mean(batch.group_s),
        "group_max_s": max(batch.group_s, default=0.0),
        "trained_mean_s": mean([_seconds(one) for one in batch.trajectories if not one.is_void]),
        **({"aborted_mean_s": mean([_seconds(one) for one in batch.aborted])} if batch.aborted else {}),
        "trainer_busy_s": seconds - batch.waited_s,
        "engine_busy_s": batch.engine_s,
    }


def _seconds(trajectory: Trajectory) -> float:
    return trajectory.reset_s + sum(turn.wait_s + turn.generate_s + turn.step_s for turn in trajectory.turns)


def cut_completions(trajectories: Sequence[Trajectory]) -> float:
    """Return the share of completions that were cut off at the token limit."""
    completions = [turn.completion for one in trajectories for turn in one.turns]
    return sum(one.is_cut for one in completions) / max(len(completions), 1)


def empty_actions(trajectories: Sequence[Trajectory]) -> float:
    """Return the share of turns in which the renderer found no action in the completion."""
    actions = [turn.action for one in trajectories for turn in one.turns]
    return sum(not action.strip() for action in actions) / max(len(actions), 1)


def why_no_samples(trajectories: Sequence[Trajectory]) -> str:
    """Return why there is nothing to train on: which limits ended the episodes, or why the first one is void."""
    lost = next((one for one in trajectories if one.is_void), trajectories[0]).outcome
    stops = Counter(one.outcome.stop for one in trajectories if one.is_filtered)
    keys = {StopReason.CONTEXT_OVERFLOW: "rollout.max_tokens", StopReason.PLAYER_TIMEOUT: "rollout.player_timeout_s"}
    reached = ", ".join(f"{stops[stop]} reached {key}" for stop, key in keys.items() if stops[stop])
    if not lost.is_void:
        return f"all {len(trajectories)} episodes ended before their first answer ({reached}); raise the limit"
    others = f", or ended before their first answer ({reached})" if reached else ""
    reason = f"the first ended as {lost.stop}{f': {lost.error}' if lost.error else ''}"
    return f"all {len(trajectories)} episodes are void{others}; {reason}"
