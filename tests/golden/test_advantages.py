"""Advantages against numbers worked out by hand, and against a slow implementation on random episodes."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit.errors import UsageError
from envkit.trainer_bridge.algorithms.parts import Rollouts, Segments
from envkit.trainer_bridge.algorithms.returns import steps_of
from envkit.trainer_bridge.trainers.evaluate_part import Evaluated, evaluate_part
from tests.golden import slow

SEEDS = range(3)
FEW = settings(max_examples=25)
JUNK = 99.0
"""Stands under the mask of tools' tokens; a result that depends on it is wrong."""

Rows = Sequence[Sequence[float]]


def episodes(rewards: Rows, groups: str = "", **numbers: Rows) -> list[dict[str, Any]]:
    """Episodes with a token per turn; `numbers` are further numbers of each turn."""
    found = []
    for row, own in enumerate(rewards):
        turns = [{"reward": reward} for reward in own]
        for name, rows in numbers.items():
            turns = [{**turn, name: number} for turn, number in zip(turns, rows[row], strict=True)]
        found.append({"turns": turns, "group": groups[row] if groups else "all"})
    return found


def values(kind: str, rollouts: Sequence[Mapping[str, Any]], **keys: Any) -> list[list[float]]:
    return evaluate_part(kind, keys, rollouts).value


def near(expected: Rows) -> list[list[object]]:
    return [[pytest.approx(value, abs=2e-5, nan_ok=True) for value in row] for row in expected]


def draw(seed: int, *, turns: int = 7) -> tuple[list[list[float]], list[list[float]], str]:
    """Rewards and values of some ragged episodes, and the groups that they belong to."""
    rng = random.Random(seed)
    rewards = [
        [rng.choice([0.0, 0.0, 1.0, -0.1, rng.gauss(0, 3)]) for _ in range(rng.randint(1, turns))] for _ in "x" * 13
    ]
    estimates = [[rng.gauss(0, 1) for _ in episode] for episode in rewards]
    return rewards, estimates, "".join(rng.choice("abcde") for _ in rewards)


# --- By hand ---------------------------------------------------------------------------------------------------------

HALF, THIRD = 0.5**0.5, 3**-0.5
TOOL = {"mask": [1, 0], "old": [-1.0, JUNK], "reference": [-1.5, -JUNK], "entropy": [0.0, JUNK]}
KL = {"kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}}
STATES = [
    *episodes([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]], "aaa", observation=["st", "su", "ss"]),  # type: ignore[list-item]
    *episodes([[5.0]], "b", observation=["s"]),  # type: ignore[list-item]
]
NAMED = [
    {"group": "a", "turns": [{"rewards": {"x": 1.0}, "reward": JUNK}, {}]},
    {"group": "a", "turns": [{"rewards": {"x": -1.0, "y": 4.0}}, {"rewards": {"x": 1.0, "y": 6.0}}]},
    *[{"group": "b", "turns": [{"rewards": {"x": 1.0}}]}] * 2,
]

TABLE: list[tuple[str, dict[str, Any], list[Any], Rows]] = [
    # a: returns 1 and 3, mean 2, deviation sqrt((1 + 1) / (2 - 1)) = sqrt(2), so -1/sqrt(2) and +1/sqrt(2).
    # b: returns 0, 1 and 2, mean 1, deviation sqrt((1 + 0 + 1) / (3 - 1)) = 1, so -1, 0 and 1. c: alone, 0.
    (
        "group_normalised",
        {},
        episodes([[1.0], [0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0], [2.0], [7.0]], "ababbc"),
        [[-HALF], [-1.0, -1.0], [HALF] * 3, [0.0, 0.0], [1.0], [0.0]],
    ),
    # 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5.
    (
        "group_normalised",
        {"baseline": "others", "deviation": "none"},
        episodes([[1.0], [2.0], [3.0, 3.0]]),
        [[-3.0], [-1.5], [4.5, 4.5]],
    ),
    # The batch has the returns 1, 3, 0, 0: mean 1, squares 0 + 4 + 1 + 1 = 6, variance 2. In a, -1 and +1 over sqrt(2).
    (
        "group_normalised",
        {"deviation": "batch"},
        episodes([[1.0], [3.0], [0.0], [0.0]], "aabb"),
        [[-HALF], [HALF], [0.0], [0.0]],
    ),
    # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, variance 14 / 3.
    (
        "batch_normalised",
        {"gamma": 0.0},
        episodes([[1.0, 2.0], [3.0], [6.0]]),
        [[-2 / math.sqrt(14 / 3), -1 / math.sqrt(14 / 3)], [0.0], [3 / math.sqrt(14 / 3)]],
    ),
    # Returns 0.75, 1.5, 1 and -0.25: mean 0.75, squares 0 + 0.5625 + 0.0625 + 1 = 1.625, variance 1.625 / 3.
    (
        "batch_normalised",
        {"gamma": 0.5},
        episodes([[0.0, 1.0, 1.0], [-0.25]]),
        [[0.0, 0.75 / math.sqrt(1.625 / 3), 0.25 / math.sqrt(1.625 / 3)], [-1 / math.sqrt(1.625 / 3)]],
    ),
    # Returns 2 on one token and 0 on two, less the mean 1 of their group: 1, -1, -1, with mean -1/3 and squares
    # 16/9 + 4/9 + 4/9, variance 4/3. The episode alone in b has no part in it.
    (
        "reinforce_plus_plus",
        {"baseline": "group"},
        [
            *episodes([[2.0], [0.0, 0.0]], "aa"),
            {"group": "b", "turns": [{"reward": 5.0, "logp": [-1.0, -1.0]}]},
        ],
        [[4 / 3 / math.sqrt(4 / 3)], [-2 / 3 / math.sqrt(4 / 3)] * 2, [0.0, 0.0]],
    ),
    # With gamma 0.5, returns 1, 2 and 0: mean 1, deviation 1. The tool's token is no step.
    (
        "reinforce_plus_plus",
        {"gamma": 0.5},
        [{"turns": [{"reward": 0.0, **TOOL}, {"reward": 2.0}]}, {"turns": [{}]}],
        [[0.0, 1.0], [-1.0]],
    ),
    # Sums 2, 1, 0: mean 1, deviation 1. From s in a: 0 + 0.5 * 2 = 1, 1, 0, 0; mean 1/2, variance 4/4/3, so 1/2 over
    # sqrt(1/3) is 0.866. t and u occur once. b is another task.
    (
        "gigpo",
        {"gamma": 0.5},
        STATES,
        [[1 + 0.5 / THIRD, 1.0], [0.5 / THIRD, 0.0], [-1 - 0.5 / THIRD] * 2, [0.0]],
    ),
    (
        "gigpo",
        {"gamma": 0.5, "deviation": "none", "step_weight": 2.0},
        STATES,
        [[2.0, 1.0], [1.0, 0.0], [-2.0] * 2, [0.0]],
    ),
    # Without observations, only the episodes are compared.
    ("gigpo", {}, episodes([[0.0, 2.0], [1.0], [0.0]]), [[1.0, 1.0], [0.0], [-1.0]]),
    # The outcome is 2, after 2, 1 and 0 more turns.
    ("chunk_returns", {"gamma": 0.5}, episodes([[0.0, 1.0, 1.0], [-4.0]]), [[0.5, 1.0, 2.0], [-4.0]]),
    # 1 + 0.5 * 1 = 1.5; 0 + 0.5 * 1.5 = 0.75.
    (
        "chunk_returns",
        {"gamma": 0.5, "reward": "turns"},
        episodes([[0.0, 1.0, 1.0], [-4.0]]),
        [[0.75, 1.5, 1.0], [-4.0]],
    ),
    # A turn without policy tokens is no chunk; its reward counts.
    (
        "chunk_returns",
        {"gamma": 0.5},
        [{"turns": [TOOL, {"reward": 1.0, "mask": [0, 0]}, {"reward": 1.0, "starts_sample": True}]}],
        [[1.0, 2.0]],
    ),
    # Outcomes 2 and -4: mean -1, deviation sqrt(18), so 3 / sqrt(18) = 1/sqrt(2); b is alone.
    (
        "chunk_returns",
        {"gamma": 0.5, "normalise": "group"},
        episodes([[0.0, 1.0, 1.0], [-4.0], [7.0]], "aab"),
        [[HALF / 4, HALF / 2, HALF], [-HALF], [0.0]],
    ),
    # Returns 0.5, 1 and 0 of the turns: mean 0.5, deviation 0.5.
    (
        "chunk_returns",
        {"gamma": 0.5, "reward": "turns", "normalise": "group"},
        episodes([[0.0, 1.0], [0.0], [7.0]], "aab"),
        [[0.0, 1.0], [-1.0], [0.0]],
    ),
    # The best of two is 2, 3, 3: mean 8/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3. With 1 among them: 2.5; with 2: 2.5;
    # with 3: 3. So -1/6, -1/6 and 1/3, over sqrt(1/3).
    ("pass_at_k", {"k": 2}, episodes([[1.0], [1.0, 1.0], [3.0]]), [[-0.5 * THIRD], [-0.5 * THIRD] * 2, [THIRD]]),
    # Chen et al.: two of four are right; mean 1 - C(2,2)/C(4,2) = 5/6, variance 5/36 of a population, 1/6 of a sample.
    # Right: 1 - 5/6. Wrong: 1 - 5/6 - C(1,1)/C(3,1) = -1/6.
    (
        "pass_at_k",
        {"k": 2},
        episodes([[1.0], [0.0], [0.0], [1.0]]),
        [[6**-0.5], [-(6**-0.5)], [-(6**-0.5)], [6**-0.5]],
    ),
    # Any two have the best return, 1; a group of two; alone.
    ("pass_at_k", {"k": 2}, episodes([[1.0], [0.0], [1.0], [0.0], [1.0], [3.0]], "aaabbc"), [[0.0]] * 6),
    # x: 1 and 0, so +-1/sqrt(2); y: 0 and 10, so -+1/sqrt(2), twice. In b, all are equal.
    (
        "several_rewards",
        {"weights": {"y": 2.0}, "whiten": False},
        NAMED,
        [[-HALF] * 2, [HALF] * 2, [0.0], [0.0]],
    ),
    # Those four have mean 0 and variance (1/2 + 1/2) / 3.
    (
        "several_rewards",
        {"weights": {"y": 2.0}},
        NAMED,
        [[-HALF / THIRD] * 2, [HALF / THIRD] * 2, [0.0], [0.0]],
    ),
    # x and y cancel each other out.
    ("several_rewards", {"whiten": False}, NAMED, [[0.0] * 2, [0.0] * 2, [0.0], [0.0]]),
    # 2 * (-0.5 + 1), 2 * (-3 + 2); a difference of -50 counts as -20. Rewards do not count.
    (
        "distillation",
        {"coefficient": 2.0},
        [
            {"turns": [{"reward": 5.0, "old": [-1, JUNK, -2], "reference": [-0.5, -JUNK, -3], "mask": [1, 0, 1]}]},
            {"turns": [{"old": [0.0], "reference": [-50.0]}]},
        ],
        [[1.0, -2.0], [-40.0]],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "keys", "rollouts", "expected"), TABLE)
def test_advantages_by_hand(kind: str, keys: dict[str, Any], rollouts: list[Any], expected: Rows) -> None:
    assert values(kind, rollouts, **keys) == near(expected)


def test_reinforce_plus_plus_counts_the_divergence_of_each_token_and_those_after_it() -> None:
    # Divergences 0.1 * (-1 + 1.5) = 0.05 and 0: returns 1 - 0.05, 1 and 0. Mean 0.65; squares 0.09 + 0.1225 + 0.4225.
    rollouts: list[Any] = [
        {"turns": [TOOL, {"old": [-1.0], "reference": [-1.0], "reward": 1.0, "starts_sample": True}]},
        {"turns": [{"old": [-3.0], "reference": [-3.0]}]},
    ]
    deviation = math.sqrt(0.635 / 2)
    expected = [[0.3 / deviation, 0.35 / deviation], [-0.65 / deviation]]
    assert evaluate_part("reinforce_plus_plus", {}, rollouts, KL).value == near(expected)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"^algorithm\.advantage: several_rewards needs named rewards, .* return info\[\"rewards\"\]"),
        (
            {"weights": {"z": 1.0}},
            r"^algorithm\.advantage\.weights: no episode of this train step names a reward 'z', only: x, y",
        ),
    ],
)
def test_several_rewards_need_rewards_with_these_names(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        values("several_rewards", NAMED if keys else episodes([[1.0], [2.0]]), **keys)


# --- Against slow implementations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_returns_agree_with_the_slow_ones(seed: int, gamma: float) -> None:
    rewards, _, groups = draw(seed)
    rollouts, returns = episodes(rewards, groups), [slow.returns(episode, gamma) for episode in rewards]
    assert values("chunk_returns", rollouts, gamma=gamma, reward="turns") == near(returns)
    expected = near(slow.normalised(returns))
    assert values("batch_normalised", rollouts, gamma=gamma) == expected
    assert values("reinforce_plus_plus", rollouts, gamma=gamma) == expected  # a turn has one token
    assert values("chunk_returns", rollouts, gamma=gamma, reward="turns", normalise="batch") == expected
    expected = near(slow.group_normalised(rewards, groups, gamma))
    assert values("group_normalised", rollouts, gamma=gamma) == expected
    if gamma == 1.0:
        assert values("pass_at_k", rollouts, k=1) == values("gigpo", rollouts) == expected


@pytest.mark.parametrize("k", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", SEEDS)
def test_pass_at_k_agrees_with_the_slow_one_for_any_rewards(seed: int, k: int) -> None:
    rng = random.Random(seed)
    total = [rng.choice([0.0, 1.0, rng.gauss(0, 2)]) for _ in range(7)]
    expected = [[one] for one in slow.pass_at_k(total, k)]
    assert values("pass_at_k", episodes([[one] for one in total]), k=k) == near(expected)


# --- Equal returns ---------------------------------------------------------------------------------------------------

scales = st.floats(-3.0, 6.0).map(lambda exponent: 10.0**exponent)
unit_rewards = st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=12)


def is_flat(kind: str, rewards: Rows, **keys: Any) -> bool:
    return not any(value for row in values(kind, episodes(rewards), **keys) for value in row)


@pytest.mark.parametrize("moves", [1, 3, 6, 7, 11, 16])
def test_identical_sokoban_episodes_teach_nothing(moves: int) -> None:
    # -0.1 for each move and 10.9 for the last: the mean of eight such returns in float32 is often one ulp away.
    for kind in ("group_normalised", "pass_at_k", "gigpo"):
        assert is_flat(kind, [[-0.1] * (moves - 1) + [10.9]] * 8)


@FEW
@given(unit_rewards, scales, st.integers(2, 33), st.sampled_from([0.9, 1.0]))
def test_identical_episodes_of_any_scale_teach_nothing(
    rewards: list[float], scale: float, size: int, gamma: float
) -> None:
    same = [[reward * scale for reward in rewards]] * size
    assert is_flat("group_normalised", same, gamma=gamma)
    assert is_flat("chunk_returns", same, gamma=gamma, normalise="batch")


@FEW
@given(st.integers(2, 12), st.floats(-1.0, 1.0), scales, st.integers(2, 33))
def test_equal_returns_over_different_numbers_of_turns_teach_nothing(
    turns: int, total: float, scale: float, size: int
) -> None:
    # In float32, the shares of a return do not add up to exactly the return.
    assert is_flat("group_normalised", [[total * scale], [total * scale / turns] * turns] * size)


@FEW
@given(st.floats(-1.0, 1.0), scales, st.lists(st.integers(1, 12), min_size=1, max_size=33))
def test_equal_values_of_any_scale_are_normalised_to_zero(value: float, scale: float, turns: list[int]) -> None:
    assert is_flat("batch_normalised", [[value * scale] * count for count in turns], gamma=0.0)


@FEW
@given(st.floats(-1.0, 1.0), scales, st.sampled_from([-1.0, 1.0]), st.integers(2, 33))
def test_a_small_difference_of_any_scale_is_learned_from(mean: float, scale: float, sign: float, size: int) -> None:
    # The last return differs by 1 %: its advantage is (size - 1) / sqrt(size), and the others are equal.
    returns = [mean * scale] * (size - 1) + [mean * scale + sign * 0.01 * scale]
    got = [value for (value,) in values("group_normalised", episodes([[value] for value in returns]))]
    share = 0.01 * scale / size**0.5 / (0.01 * scale / size**0.5 + 1e-6)
    assert got[-1] == pytest.approx(sign * share * (size - 1) / size**0.5, rel=1e-3)
    assert got[:-1] == pytest.approx([-sign * share / size**0.5] * (size - 1), rel=1e-3)


# --- Generalised advantage estimates ---------------------------------------------------------------------------------

REWARDS = [[1.0, 0.0, 2.0], [0.0, 1.0]]
VALUES = [[0.5, 1.0, 1.0], [2.0, 0.0]]
HALVES = {"gamma": 0.5, "gae_lambda": 0.5}


def of_tokens(rewards: Rows, estimates: Rows, stops: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The same steps as tokens: in turns of one or two with tools' tokens between, and in several samples."""
    found = []
    for row, (own, of_them) in enumerate(zip(rewards, estimates, strict=True)):
        turns: list[dict[str, Any]] = []
        for number, (reward, value) in enumerate(zip(own, of_them, strict=True)):
            if number % 3 == 1 and not turns[-1]["reward"]:  # a turn's reward is at its last token
                turns[-1]["values"] += [JUNK, value]
                turns[-1]["mask"] += [0, 1]
                turns[-1]["reward"] = reward
            else:
                turns.append(
                    {"reward": reward, "values": [value, JUNK], "mask": [1, 0], "starts_sample": number % 4 > 1}
                )
        found.append({"turns": turns, "stop": stops[row] if stops else "terminated", "after": of_them[-1]})
    return found


def test_lambda_between_weighs_later_errors_less() -> None:
    # Errors of one step 1, -0.5, 1 and -2, 1; gamma * lambda = 0.25.
    # A2 = 1; A1 = -0.5 + 0.25 * 1 = -0.25; A0 = 1 + 0.25 * -0.25 = 0.9375.  B1 = 1; B0 = -2 + 0.25 * 1 = -1.75.
    expected = near(slow.normalised([[0.9375, -0.25, 1.0], [-1.75, 1.0]]))
    for unit, rollouts in (("turn", episodes(REWARDS, value=VALUES)), ("token", of_tokens(REWARDS, VALUES))):
        made = evaluate_part("gae", {**HALVES, "unit": unit}, rollouts)
        assert made.targets == [[[1.4375, 0.75, 2.0], [0.25, 1.0]]]  # A + V
        assert made.value == expected


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.0), (0.95, 0.95), (0.5, 0.3), (0.0, 0.5)])
@pytest.mark.parametrize("seed", SEEDS)
def test_estimates_agree_with_the_slow_ones(seed: int, gamma: float, gae_lambda: float) -> None:
    rewards, estimates, _ = draw(seed)
    stops = [random.Random(seed + row).choice(["terminated", "max_turns"]) for row in range(len(rewards))]
    expected = [
        slow.gae(own, value, gamma, gae_lambda, value[-1] if stop == "max_turns" else 0.0)
        for own, value, stop in zip(rewards, estimates, stops, strict=True)
    ]
    targets = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(expected, estimates, strict=True)]
    turns = [
        {**one, "stop": stop, "after": value[-1]}
        for one, value, stop in zip(episodes(rewards, value=estimates), estimates, stops, strict=True)
    ]
    for unit, rollouts in (("turn", turns), ("token", of_tokens(rewards, estimates, stops))):
        made = evaluate_part("gae", {"unit": unit, "gamma": gamma, "gae_lambda": gae_lambda}, rollouts)
        assert made.targets == [near(targets)]
        assert made.value == near(slow.normalised(expected))


@pytest.mark.parametrize("unit", ["turn", "token"])
@pytest.mark.parametrize(
    ("stop", "target"),
    [
        # The value after the last token is 1: error 2 + 0.5 * 1 - 1 = 1.5.
        # A2 = 1.5; A1 = -0.5 + 0.25 * 1.5 = -0.125; A0 = 1 + 0.25 * -0.125 = 0.96875; the targets are A + V.
        *((stop, [1.46875, 0.875, 2.5]) for stop in ("truncated", "max_turns", "context_overflow", "player_timeout")),
        *((stop, [1.4375, 0.75, 2.0]) for stop in ("terminated", "timeout")),
    ],
)
def test_the_state_after_a_limit_has_the_value_after_the_last_token(unit: str, stop: str, target: list[float]) -> None:
    stops = [stop, "terminated"]
    rollouts = of_tokens(REWARDS, VALUES, stops)
    if unit == "turn":
        rollouts = [
            {**one, "stop": of, "after": 1.0} for one, of in zip(episodes(REWARDS, value=VALUES), stops, strict=True)
        ]
    assert evaluate_part("gae", {**HALVES, "unit": unit}, rollouts).targets == [[target, [0.25, 1.0]]]
    without = evaluate_part("gae", {**HALVES, "unit": unit, "bootstrap": False}, rollouts)
    assert without.targets == [[[1.4375, 0.75, 2.0], [0.25, 1.0]]]


def test_a_turn_without_policy_tokens_is_no_step() -> None:
    # As in the first episode of `REWARDS`: its second turn is between two others, and its reward is at the one before.
    first, *others = [{"reward": reward, "value": value} for reward, value in zip(REWARDS[0], VALUES[0], strict=True)]
    silent = {"reward": 1.0, "value": JUNK, "mask": [0, 0]}
    made = evaluate_part("gae", HALVES, [{"turns": [{**first, "reward": 0.0}, silent, *others]}])
    assert made.targets == [[[1.4375, 0.0, 0.75, 2.0]]]


def test_steps_are_in_the_order_of_turns_whatever_the_order_of_samples() -> None:
    rollout_N, turn_N = torch.tensor([[1, 1, 0, 0, 0, 1], [2, 2, 1, 0, 0, 0]])
    zeros_ET, zeros_N = torch.zeros(2, 3), torch.zeros(6)
    segments = Segments(rollout_N, rollout_N, turn_N, rollout_N)
    rollouts = Rollouts(
        *(zeros_ET, zeros_ET, zeros_ET[None], torch.zeros(1, 2), zeros_ET.long(), ["a", "a"], [0, 1], [None, None]),
        *(segments, zeros_N, zeros_N, zeros_N),
    )
    for unit, places in (("token", [1, 2, 2, 0, 1, 0]), ("turn", [1, 1, 1, 0, 0, 0])):
        steps = steps_of(rollouts, unit)  # type: ignore[arg-type]
        assert steps.place_N.tolist() == places
        assert steps.mask_ES.sum(1).tolist() == ([3, 3] if unit == "token" else [2, 2])


# --- Two critics -----------------------------------------------------------------------------------------------------


def two_critics(estimates: Sequence[Sequence[Sequence[float]]]) -> Evaluated:
    """Two episodes of a group, of which the second is the first member."""
    rollouts: list[dict[str, Any]] = episodes([[0.0, 1.0], [1.0, 0.0, 2.0]], value=estimates)  # type: ignore[arg-type]
    whole = [{**one, "member": member} for one, member in zip(rollouts, (1, 0), strict=True)]
    return evaluate_part("asyppo", {"gae_lambda": 1.0}, whole)


def test_asyppo_masks_by_the_disagreement_of_critics_that_learn_from_different_episodes() -> None:
    # V = 0.1, 2 and 0.5, 1.2, 0.3; returns 1, 1 and 3, 2, 2, so A = 0.9, -1 and 2.5, 0.8, 1.7. A fifth of five turns is
    # one: the critics differ by 0.2, 2, 1, 0.4 and 0.6, least on the first turn and most on the second.
    made = two_critics([[[0.0, 0.2], [1.0, 3.0]], [[0.0, 1.0], [1.0, 1.4], [0.0, 0.6]]])
    (_, second), others = slow.normalised([[0.9, -1.0], [2.5, 0.8, 1.7]])
    assert made.value == near([[0.0, second], others])
    assert made.entropy_weight == [[1.0, 0.0], [1.0, 1.0, 1.0]]
    unknown = [math.nan, math.nan]
    assert [*made.targets] == [near([unknown, [3.0, 2.0, 2.0]]), near([[1.0, 1.0], [*unknown, math.nan]])]


def test_asyppo_masks_nothing_while_the_critics_are_equal() -> None:
    made = two_critics([[[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]])
    assert made.value == near(slow.normalised([[1.0, 0.0], [3.0, 1.0, 2.0]]))
    assert made.entropy_weight == [[1.0, 1.0], [1.0, 1.0, 1.0]]
