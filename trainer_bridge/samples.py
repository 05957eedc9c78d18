"""Conversion of trajectories to training samples: token sequences with a mask and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from envkit.types import Group, Sample, Trajectory, Turn


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """Return the training samples of the trajectories in `groups`, in order.

    Trajectories without turns are omitted. So are void trajectories (lost sandbox, hung step, broken environment),
    because their outcome says nothing about the policy.
    """
    played = [
        (trajectory, group.task.key)
        for group in groups
        for trajectory in group.trajectories
        if trajectory.turns and not trajectory.stop.is_void
    ]
    return [
        sample for episode, (trajectory, key) in enumerate(played) for sample in samples_from(trajectory, key, episode)
    ]


def samples_from(trajectory: Trajectory, group: str, episode: int) -> list[Sample]:
    """Return the samples of a trajectory, which store the task key `group` and the trajectory's index `episode`.

    Consecutive turns form one sample, but a turn whose prompt does not begin with the tokens of the previous turns
    starts a new sample. The mask is 1 on the tokens that the policy generated.
    """
    starts = [number for number, turn in enumerate(trajectory.turns) if number == 0 or turn.starts_sample]
    rewards = tuple(0.0 if turn.step is None else turn.step.reward for turn in trajectory.turns)
    return [
        _sample(trajectory.turns[first:end], first, group=group, rewards=rewards, episode=episode)
        for first, end in zip(starts, [*starts[1:], len(trajectory.turns)], strict=True)
    ]


def _sample(turns: Sequence[Turn], first: int, *, group: str, rewards: tuple[float, ...], episode: int) -> Sample:
    token_ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    turn_ids: list[int] = []
    versions: list[int] = []
    for number, turn in enumerate(turns, first):
        prompt_length, completion_length = len(turn.new_ids), len(turn.completion.token_ids)
        token_ids += turn.new_ids
        token_ids += turn.completion.token_ids
        mask += [0] * prompt_length + [1] * completion_length
        logprobs += [0.0] * prompt_length
        logprobs += turn.completion.logprobs
        turn_ids += [number] * (prompt_length + completion_length)
        versions += [-1] * prompt_length
        for version, count in turn.completion.versions:
            versions += [version] * count
    return Sample(
        group=group,
        token_ids=tuple(token_ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        turn_ids=tuple(turn_ids),
        rewards=rewards,
        versions=tuple(versions),
        episode=episode,
    )
