"""Converts trajectories to training samples: arrays of tokens, masks and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from envkit.types import Floats, Group, Hashes, Sample, Trajectory, Turn, hashes, ints, stable_hash


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """Return the training samples of the trajectories in `groups`, in order.

    Trajectories without turns are omitted. So are void trajectories (lost sandbox, hung step, broken environment),
    because their outcome says nothing about the policy.
    """
    return [
        sample
        for group in groups
        for trajectory in group.trajectories
        if trajectory.turns and not trajectory.is_void
        for sample in samples_from(trajectory)
    ]


def samples_from(trajectory: Trajectory) -> list[Sample]:
    """Join the turns of one trajectory into samples; the mask is True on the policy's tokens.

    Consecutive turns form one sample, but a turn whose prompt does not begin with the tokens of the previous turns
    starts a new sample. The mask is 1 on the tokens that the policy generated.
    """
    turns = trajectory.turns
    starts = [number for number, turn in enumerate(turns) if number == 0 or turn.starts_sample]
    rewards = np.array([0.0 if turn.step is None else turn.step.reward for turn in turns], dtype=np.float32)
    if trajectory.outcome.grade is not None:
        rewards[-1] += trajectory.outcome.grade
    observed, named = _observed(trajectory), _named_rewards(trajectory)
    return [
        _sample(trajectory, turns[first:end], first, rewards, observed, named)
        for first, end in zip(starts, [*starts[1:], len(turns)], strict=True)
    ]


def _sample(
    trajectory: Trajectory,
    turns: Sequence[Turn],
    first: int,
    rewards: Floats,
    observed: Hashes,
    named: Mapping[str, Floats],
) -> Sample:
    parts = [ids for turn in turns for ids in (turn.new_ids, turn.completion.token_ids)]
    lengths = np.array([len(ids) for ids in parts])
    mask = np.repeat(np.arange(len(parts)) % 2 == 1, lengths)
    logprobs = np.zeros(len(mask), dtype=np.float32)
    logprobs[mask] = np.concatenate([turn.completion.logprobs for turn in turns])
    versions = np.full(len(mask), -1, dtype=np.int32)
    ranges = [one for turn in turns for one in turn.completion.versions]
    versions[mask] = np.repeat([version for version, _ in ranges], [count for _, count in ranges])
    return Sample(
        group=trajectory.group or trajectory.task.key,
        token_ids=np.concatenate(parts),
        mask=mask,
        logprobs=logprobs,
        turn_ids=ints(np.repeat(first + np.arange(len(parts)) // 2, lengths)),
        rewards=rewards,
        versions=versions,
        episode=trajectory.key,
        member=trajectory.member,
        env_id=trajectory.task.env_id,
        stop=trajectory.outcome.stop,
        observations=observed,
        is_graded=trajectory.outcome.grade is not None,
        named_rewards=named,
    )


def _named_rewards(trajectory: Trajectory) -> dict[str, Floats]:
    """Return the rewards of each turn by name [T], from ``info["rewards"]``; 0 where a step does not name them."""
    found: dict[str, Floats] = {}
    for number, turn in enumerate(trajectory.turns):
        named = {} if turn.step is None else turn.step.info.get("rewards")
        for name, reward in named.items() if isinstance(named, dict) else ():
            if isinstance(reward, (int, float)):
                found.setdefault(name, np.zeros(len(trajectory.turns), dtype=np.float32))[number] = reward
    return found


def _observed(trajectory: Trajectory) -> Hashes:
    """Return the hash of the observation that each turn answers; 0 where it is unknown."""
    before = [None if trajectory.start is None else trajectory.start.observation]
    before += [None if turn.step is None else turn.step.observation for turn in trajectory.turns[:-1]]
    return hashes([0 if one is None else stable_hash(one.text) for one in before])
