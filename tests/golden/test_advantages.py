"""Advantages against numbers worked out by hand, and against a slow implementation on random episodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envkit.trainer_bridge.algorithms.returns import discounted_returns
from envkit.types import StopReason
from tests.golden import slow
from tests.golden.parts import Worth, mask_of, padded, part

SEEDS = range(12)

Episodes = Sequence[Sequence[float]]


def worth(kind: str, rewards: Episodes, *groups: str, values: Episodes = (), **keys: Any) -> Worth:
    """What an advantage makes of the rewards, in one group unless groups are named."""
    inputs = {"groups": groups or None, "values": [values] if values else ()}
    made: Worth = part("advantages", {"kind": kind, **keys}, rewards, **inputs)
    return made


def near(expected: Episodes) -> list[list[object]]:
    return [[pytest.approx(value, abs=2e-5) for value in row] for row in expected]


def close(expected: Episodes) -> list[object]:
    """Rows that are near `expected` where turns exist and exactly zero elsewhere."""
    longest = max(len(row) for row in expected)
    return [[*(pytest.approx(value, abs=2e-5) for value in row), *[0.0] * (longest - len(row))] for row in expected]


def draw(seed: int, *, turns: int = 7) -> tuple[list[list[float]], list[list[float]], list[str]]:
    """Rewards and values of some ragged episodes, and the groups that they belong to."""
    rng = random.Random(seed)
    rewards = [
        [rng.choice([0.0, 0.0, 1.0, -0.1, rng.gauss(0, 3)]) for _ in range(rng.randint(1, turns))] for _ in "x" * 13
    ]
    values = [[rng.gauss(0, 1) for _ in episode] for episode in rewards]
    return rewards, values, [rng.choice("abcde") for _ in rewards]


# --- Returns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_returns_agree_with_the_slow_ones(seed: int, gamma: float) -> None:
    rewards, _, _ = draw(seed)
    mask_ET = mask_of(rewards)
    got = discounted_returns(padded(rewards), mask_ET, gamma=gamma)
    expected = [value for episode in rewards for value in slow.returns(episode, gamma)]
    assert got[mask_ET > 0].tolist() == pytest.approx(expected, abs=2e-5)
    assert not got[mask_ET == 0].any()


# --- GRPO ------------------------------------------------------------------------------------------------------------


def test_two_groups_are_compared_each_with_itself_although_their_rows_are_mixed() -> None:
    # a: returns 1 and 3, mean 2, deviation sqrt((1 + 1) / (2 - 1)) = sqrt(2), so -1/sqrt(2) and +1/sqrt(2).
    # b: returns 0, 1 and 2, mean 1, deviation sqrt((1 + 0 + 1) / (3 - 1)) = 1, so -1, 0 and 1.
    episodes = [[1.0], [0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0], [2.0]]
    got = worth("group_normalised", episodes, *"ababb").advantages
    half = 0.5**0.5
    assert got == near([[-half], [-1.0, -1.0], [half, half, half], [0.0, 0.0], [1.0]])


@pytest.mark.parametrize("gamma", [0.5, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages_agree_with_the_slow_ones(seed: int, gamma: float) -> None:
    rewards, _, groups = draw(seed)
    got = worth("group_normalised", rewards, *groups, gamma=gamma).advantages
    assert got == near(slow.group_normalised(rewards, groups, gamma))


# --- Return batch normalisation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_batch_advantages_agree_with_the_slow_ones(seed: int, gamma: float) -> None:
    rewards, _, _ = draw(seed)
    got = worth("batch_normalised", rewards, gamma=gamma).advantages
    assert got == near(slow.normalised([slow.returns(episode, gamma) for episode in rewards]))


def test_normalised_values_have_mean_zero_and_deviation_one() -> None:
    # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, variance 3.5.
    values = [[1.0, 2.0], [3.0], [6.0]]
    root = 3.5**0.5
    expected = [[-2 / root, -1 / root], [0.0], [3 / root]]
    assert worth("batch_normalised", values, gamma=0.0).advantages == near(expected)


# --- Equal returns ---------------------------------------------------------------------------------------------------

scales = st.floats(-3.0, 6.0).map(lambda exponent: 10.0**exponent)
unit_rewards = st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=12)


def is_flat(made: Worth) -> bool:
    return not any(value for row in made.advantages for value in row)


@pytest.mark.parametrize("moves", range(1, 17))
def test_identical_sokoban_episodes_teach_nothing(moves: int) -> None:
    # -0.1 for each move and 10.9 for the last: the mean of eight such returns in float32 is often one ulp away.
    episodes = [[-0.1] * (moves - 1) + [10.9]] * 8
    assert worth("group_normalised", episodes).advantages == [[0.0] * moves] * 8


@given(unit_rewards, scales, st.integers(2, 33), st.sampled_from([0.9, 1.0]))
def test_identical_episodes_of_any_scale_teach_nothing(
    rewards: list[float], scale: float, size: int, gamma: float
) -> None:
    episodes = [[reward * scale for reward in rewards]] * size
    assert is_flat(worth("group_normalised", episodes, gamma=gamma))


@given(st.integers(2, 12), st.floats(-1.0, 1.0), scales, st.integers(2, 33))
def test_equal_returns_over_different_numbers_of_turns_teach_nothing(
    turns: int, total: float, scale: float, size: int
) -> None:
    # In float32, the shares of a return do not add up to exactly the return.
    episodes = [[total * scale], [total * scale / turns] * turns] * size
    assert is_flat(worth("group_normalised", episodes))


@given(st.floats(-1.0, 1.0), scales, st.lists(st.integers(1, 12), min_size=1, max_size=33))
def test_equal_values_of_any_scale_are_normalised_to_zero(value: float, scale: float, turns: list[int]) -> None:
    episodes = [[value * scale] * count for count in turns]
    assert is_flat(worth("batch_normalised", episodes, gamma=0.0))


@given(st.floats(-1.0, 1.0), scales, st.sampled_from([-1.0, 1.0]), st.integers(2, 33))
def test_a_small_difference_of_any_scale_is_learned_from(mean: float, scale: float, sign: float, size: int) -> None:
    # The last return differs by 1 %: its advantage is (size - 1) / sqrt(size), and the others are equal.
    values = [mean * scale] * (size - 1) + [mean * scale + sign * 0.01 * scale]
    episodes = [[value] for value in values]
    got = [value for (value,) in worth("group_normalised", episodes).advantages]
    share = 0.01 * scale / size**0.5 / (0.01 * scale / size**0.5 + 1e-6)
    assert got[-1] == pytest.approx(sign * share * (size - 1) / size**0.5, rel=1e-3)
    assert got[:-1] == pytest.approx([-sign * share / size**0.5] * (size - 1), rel=1e-3)


# --- Generalised advantage estimates ---------------------------------------------------------------------------------

REWARDS = [[1.0, 0.0, 2.0], [0.0, 1.0]]
VALUES = [[0.5, 1.0, 1.0], [2.0, 0.0]]


def test_lambda_between_weighs_later_errors_less() -> None:
    # Errors of one step 1, -0.5, 1 and -2, 1; gamma * lambda = 0.25.
    # A2 = 1; A1 = -0.5 + 0.25 * 1 = -0.25; A0 = 1 + 0.25 * -0.25 = 0.9375.  B1 = 1; B0 = -2 + 0.25 * 1 = -1.75.
    made = worth("gae", REWARDS, values=VALUES, gamma=0.5, gae_lambda=0.5)
    assert made.targets == [[[1.4375, 0.75, 2.0], [0.25, 1.0]]]  # A + V
    assert made.advantages == near(slow.normalised([[0.9375, -0.25, 1.0], [-1.75, 1.0]]))


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.0), (0.95, 0.95), (0.5, 0.3), (0.0, 0.5)])
@pytest.mark.parametrize("seed", SEEDS)
def test_estimates_agree_with_the_slow_ones(seed: int, gamma: float, gae_lambda: float) -> None:
    rewards, values, _ = draw(seed)
    made = worth("gae", rewards, values=values, gamma=gamma, gae_lambda=gae_lambda)
    expected = [slow.gae(one, value, gamma, gae_lambda) for one, value in zip(rewards, values, strict=True)]
    targets = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(expected, values, strict=True)]
    assert made.targets == [near(targets)]
    assert made.advantages == near(slow.normalised(expected))


@pytest.mark.parametrize(
    ("stop", "targets"),
    [
        # The value of the last turn, 1, stands for that of the state after it: error 2 + 0.5 * 1 - 1 = 1.5.
        # A2 = 1.5; A1 = -0.5 + 0.25 * 1.5 = -0.125; A0 = 1 + 0.25 * -0.125 = 0.96875; the targets are A + V.
        *((stop, [1.46875, 0.875, 2.5]) for stop in ("truncated", "max_turns", "context_overflow", "player_timeout")),
        *((stop, [1.4375, 0.75, 2.0]) for stop in ("terminated", None)),
    ],
)
def test_the_state_after_a_limit_has_the_value_of_the_last_turn_if_asked(
    stop: str | None, targets: list[float]
) -> None:
    stops = [None if stop is None else StopReason(stop), StopReason.TERMINATED]
    settings = {"kind": "gae", "gamma": 0.5, "gae_lambda": 0.5}
    made = part("advantages", {**settings, "bootstrap": True}, REWARDS, values=[VALUES], stops=stops)
    assert made.targets == [[targets, [0.25, 1.0]]]
    assert part("advantages", settings, REWARDS, values=[VALUES], stops=stops).targets == [
        [[1.4375, 0.75, 2.0], [0.25, 1.0]]
    ]
