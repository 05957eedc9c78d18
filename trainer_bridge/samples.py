"""Converts trajectories to training samples: arrays of tokens, masks and rewards."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from envkit.types import (
    AgentCall,
    Completion,
    Floats,
    Group,
    Hashes,
    Ints,
    Sample,
    Trajectory,
    Turn,
    hashes,
    ints,
    stable_hash,
)

_Call: TypeAlias = tuple[int, Ints, Completion]
"""Number of a turn, the tokens before its completion, and the completion."""


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
    starts a new sample. The calls of a foreign agent name the turns that they continue; see `AgentCall`. Its turns
    without tokens to train on are not counted, and their rewards belong to the turn before.
    """
    turns = trajectory.turns
    rewards = np.array([0.0 if turn.step is None else turn.step.reward for turn in turns], dtype=np.float32)
    if trajectory.outcome.grade is not None:
        rewards[-1] += trajectory.outcome.grade
    observed, named = _observed(trajectory), _named_rewards(trajectory)
    if any(turn.call is not None for turn in turns):
        trained, rows = _rows_of_calls(turns)
        owners = [max(0, bisect_right(trained, number) - 1) for number in range(len(turns))]
        rewards, observed = _summed(rewards, owners), observed[trained]
        named = {name: _summed(values, owners) for name, values in named.items()}
    else:
        starts = [number for number, turn in enumerate(turns) if number == 0 or turn.starts_sample]
        rows = [
            [(number, turns[number].new_ids, turns[number].completion) for number in range(first, end)]
            for first, end in zip(starts, [*starts[1:], len(turns)], strict=True)
        ]
    return [_sample(trajectory, row, rewards, observed, named) for row in rows]


def trained_parts(trajectory: Trajectory) -> tuple[list[Completion], Counter[str]]:
    """Return what may be trained on of each completion, and by cause how many of the other tokens were sampled."""
    turns, causes = trajectory.turns, Counter[str]()
    kept = _kept(turns)
    parts = []
    for number, turn in enumerate(turns):
        length = len(turn.completion.token_ids)
        call = turn.call or AgentCall()
        trains = length if call.trains is None else call.trains
        count = min(trains, kept.get(number, length))
        causes[call.cause] += length - trains
        causes["rewritten"] += trains - count
        parts.append(_first(turn.completion, count))
    return parts, +causes


def _kept(turns: Sequence[Turn]) -> dict[int, int]:
    """Return how many tokens of a turn's completion the turn that follows it has kept, by the turn's number."""
    return {turn.call.follows: turn.call.keeps for turn in turns if turn.call and turn.call.follows is not None}


def _rows_of_calls(turns: Sequence[Turn]) -> tuple[list[int], list[list[_Call]]]:
    """Return the turns with tokens to train on, and the calls of each sample with their number among these turns."""
    kept = _kept(turns)
    trained: list[int] = []
    rows: list[list[_Call]] = []
    row_of: dict[int, list[_Call]] = {}
    context: dict[int, list[Ints]] = {}  # what each turn leaves to the next one: tokens that are not trained on
    for number, turn in enumerate(turns):
        call, completion = turn.call or AgentCall(), turn.completion
        length = len(completion.token_ids)
        keeps = kept.get(number, length)
        count = min(keeps, length if call.trains is None else call.trains)
        row = row_of[number] = [] if call.follows is None else row_of[call.follows]
        before = [*context.pop(number if call.follows is None else call.follows, ()), turn.new_ids]
        if count:
            row.append((len(trained), np.concatenate(before), _first(completion, count)))
            trained.append(number)
            before = []
        context[number] = [*before, completion.token_ids[count:keeps]]
        if call.follows is None:
            rows.append(row)
    return trained, [row for row in rows if row]


def _first(completion: Completion, count: int) -> Completion:
    if count == len(completion.token_ids):
        return completion
    versions, left = [], count
    for version, number in completion.versions:
        if left > 0:
            versions.append((version, min(number, left)))
        left -= number
    return Completion(completion.token_ids[:count], completion.logprobs[:count], completion.finish, tuple(versions))


def _summed(values: Floats, owners: Sequence[int]) -> Floats:
    """Return the values [T] summed over the turns of each owner."""
    found = np.zeros(max(owners, default=-1) + 1, dtype=np.float32)
    np.add.at(found, owners, values)
    return found


def _sample(
    trajectory: Trajectory,
    row: Sequence[_Call],
    rewards: Floats,
    observed: Hashes,
    named: Mapping[str, Floats],
) -> Sample:
    parts = [ids for _, new_ids, completion in row for ids in (new_ids, completion.token_ids)]
    lengths = np.array([len(ids) for ids in parts])
    mask = np.repeat(np.arange(len(parts)) % 2 == 1, lengths)
    logprobs = np.zeros(len(mask), dtype=np.float32)
    logprobs[mask] = np.concatenate([completion.logprobs for _, _, completion in row])
    versions = np.full(len(mask), -1, dtype=np.int32)
    ranges = [one for _, _, completion in row for one in completion.versions]
    versions[mask] = np.repeat([version for version, _ in ranges], [count for _, count in ranges])
    return Sample(
        group=trajectory.group or trajectory.task.key,
        token_ids=np.concatenate(parts),
        mask=mask,
        logprobs=logprobs,
        turn_ids=ints(np.repeat(np.repeat([number for number, _, _ in row], 2), lengths)),
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
