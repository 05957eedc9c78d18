"""Samples: arrays of equal lengths, compact, and joined from the turns of a trajectory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envkit.trainer_bridge.samples import samples_from
from envkit.types import (
    Completion,
    FinishReason,
    Observation,
    Outcome,
    Reset,
    Step,
    StopReason,
    Task,
    Trajectory,
    Turn,
    floats,
    ints,
    stable_hash,
)
from tests.trainer_bridge.models import sample

TASK = Task("Scripted-v0", 0)


def turn(
    new: list[int], answer: list[int], *versions: tuple[int, int], reward: float = 0.0, starts: bool = False
) -> Turn:
    completion = Completion(ints(answer), floats([-0.5] * len(answer)), FinishReason.LENGTH, versions)
    step = Step(Observation(f"after {answer[0]}"), reward, False, False, {})
    return Turn(ints(new), completion, "", step, starts_sample=starts)


def trajectory(*turns: Turn) -> Trajectory:
    start = Reset(Observation("start"), {})
    return Trajectory(
        TASK, 3, turns, Outcome.score(StopReason.MAX_TURNS, 0.0, {}), start=start, key="train-1/00000000/0003"
    )


def test_each_token_has_the_version_that_sampled_it() -> None:
    (one,) = samples_from(trajectory(turn([1], [5, 6, 7], (4, 1), (5, 2)), turn([2], [8], (6, 1))))
    assert one.versions.tolist() == [-1, 4, 5, 5, -1, 6]
    assert one.mask.tolist() == [False, True, True, True, False, True]


def test_all_samples_of_an_episode_have_its_key_rewards_and_observations() -> None:
    first, second = samples_from(
        trajectory(
            turn([1], [5], (0, 1), reward=0.5, starts=True),
            turn([2], [6], (0, 1), reward=-1.0),
            turn([1, 2, 3], [7], (0, 1), reward=2.0, starts=True),
        )
    )
    for one in (first, second):
        assert (one.episode, one.member, one.env_id) == ("train-1/00000000/0003", 3, "Scripted-v0")
        assert (one.group, one.stop) == (TASK.key, StopReason.MAX_TURNS)
        assert one.rewards.tolist() == [0.5, -1.0, 2.0]
        assert one.observations.tolist() == [stable_hash("start"), stable_hash("after 5"), stable_hash("after 6")]
    assert (first.turn_ids.tolist(), second.turn_ids.tolist()) == ([0, 0, 1, 1], [2, 2, 2, 2])


def test_the_arrays_of_a_sample_cannot_be_changed() -> None:
    one = sample([1, 2], ([3], []))
    for name in ("token_ids", "mask", "logprobs", "turn_ids", "rewards", "versions", "observations"):
        assert not getattr(one, name).flags.writeable, name
    ids = np.array([1, 2, 3], dtype=np.int32)
    made = replace(one, token_ids=ids)
    ids[0] = 9  # the caller's own array stays writable
    assert made.num_policy_tokens == 1


@pytest.mark.parametrize("name", ["token_ids", "versions"])
def test_a_sample_with_arrays_of_unequal_lengths_is_refused(name: str) -> None:
    one = sample([1, 2], ([3], []))
    with pytest.raises(ValueError, match=r"arrays of a sample must have one length, got \[2, 3\]"):
        replace(one, **{name: getattr(one, name)[:2]})


def test_a_sample_that_begins_with_a_token_of_the_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="first token of a sample must belong to the prompt"):
        sample([], ([3], []))
