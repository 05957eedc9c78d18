"""Trajectories to samples: tokens, masks and rewards, side by side."""

from __future__ import annotations

from collections.abc import Iterable

from envkit.types import Group, Sample, Trajectory


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """Return a sample for each trajectory that may be learned from, in order.

    Void trajectories (lost sandbox, hung step, broken world) say nothing about the policy and are left out, as are
    those without a turn.
    """
    return [
        sample_of(trajectory, group.task.key)
        for group in groups
        for trajectory in group.trajectories
        if trajectory.turns and not trajectory.stop.is_void
    ]


def sample_of(trajectory: Trajectory, group: str) -> Sample:
    """Join the turns of one trajectory into one sequence; the mask is 1 on what the policy produced."""
    token_ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    turn_ids: list[int] = []
    versions: list[int] = []
    rewards: list[float] = []
    for number, turn in enumerate(trajectory.turns):
        given, said = len(turn.new_ids), len(turn.completion.token_ids)
        token_ids += turn.new_ids
        token_ids += turn.completion.token_ids
        mask += [0] * given + [1] * said
        logprobs += [0.0] * given
        logprobs += turn.completion.logprobs
        turn_ids += [number] * (given + said)
        versions += [-1] * given
        for version, count in turn.completion.versions:
            versions += [version] * count
        rewards.append(0.0 if turn.step is None else turn.step.reward)
    return Sample(
        group=group,
        token_ids=tuple(token_ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        turn_ids=tuple(turn_ids),
        rewards=tuple(rewards),
        versions=tuple(versions),
    )
