"""Losses and their gradients: worked out by hand, against finite differences, and however rollouts are stored."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from math import log
from typing import Any

import pytest

from envkit.config import kinds
from envkit.trainer_bridge.algorithms.losses.clipped import ClipKeys
from envkit.trainer_bridge.trainers.evaluate_part import evaluate_part
from tests.golden import drawn

STEP = 1e-5
"""Half-width of the difference that stands for a derivative."""

FREE = {"dual_clip": None}


def near(rows: Sequence[Sequence[float]]) -> list[object]:
    return [pytest.approx(list(row), rel=1e-6, abs=1e-9) for row in rows]


def turn(ratios: Sequence[float], advantage: Sequence[float], *, logp: float = -1.0, **more: Any) -> dict[str, Any]:
    """A turn whose tokens have these ratios to the old policy."""
    return {
        "logp": [logp] * len(ratios),
        "old": [logp - log(ratio) for ratio in ratios],
        "advantage": advantage,
        **more,
    }


def one(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"turns": turns}]


def of_sampler(sampled: Sequence[float], policy: Sequence[float], advantage: Sequence[float]) -> list[dict[str, Any]]:
    """A rollout whose tokens have these probabilities. Those of the old policy are misleading."""
    rows = {"logp": map(log, policy), "sampled": map(log, sampled)}
    return one({**{name: [*row] for name, row in rows.items()}, "old": [-7.0] * len(policy), "advantage": advantage})


# ratios 2, 2, 0.5 and 0.5 at a clip of 0.2; A = +1, -1, +1, -1.
# +1, 2:   min(2, 1.2) = 1.2, clipped           -1, 2:   min(-2, -1.2) = -2
# +1, 0.5: min(0.5, 0.8) = 0.5                  -1, 0.5: min(-0.5, -0.8) = -0.8, clipped
# The slope of -ratio * A by logp is -ratio * A itself.
FOUR = one(turn([2, 2, 0.5, 0.5], [1, -1, 1, -1]))
# Two turns: sqrt(2 / 8) = 0.5 and 4; the whole rollout: (2 / 8 * 4)**(1/3) = 1.
TURNS = one(turn([2, 1 / 8], [1, -1]), turn([4], [-1], starts_sample=True))
# e**2 = 7.4 and 2 at a bound of 3, A = -2: min(2 * 7.4, 2 * 3) = 6 without a gradient, and 4 with one.
FAR = one(turn([math.exp(2), 2, math.exp(2)], [-2, -2, 1]))
# Weights 2, 5 (the cap) and 0.1, or within 0.5 and 1.5. The loss is -weight * A * -1, its gradient -weight * A.
WEIGHTED = one(turn([2, 8, 0.1], [1, -1, -2]))
# Products 2 / 8 = 1/4, 4 -> 1 and, for A > 0, 1. Geometric means 1/2, 1, 1. Tokens min(2, 1) = 1, 1/8, 1, 1.
TAPERED = [*one(turn([2], [-1]), turn([1 / 8], [-2], starts_sample=True)), *one(turn([4], [-1], logp=-2.0))]
TAPERED += one(turn([0.1], [3]))
# Log-ratios 1 + 3 = 4: 0.1 / 2 * 16 = 0.8, shared by two tokens; slope -A + 0.1 * 4. The other: -2, 0.2, -0.2.
MIRROR = [*one(turn([math.exp(1)], [1]), turn([math.exp(3)], [1], logp=-2.0, starts_sample=True))]
MIRROR += one(turn([math.exp(-2)], [0]))
SIGMOID = 1 / (1 + math.exp(-1))
# Binary TV: 0.1, 0.2, 0.2, 0.2 and 0.8. The second moves up and the third down, beyond 0.15; the others move back.
MASKED = of_sampler([0.1, 0.1, 0.5, 0.5, 0.1], [0.2, 0.3, 0.3, 0.3, 0.9], [1, 1, -1, 1, -1])
# KL of q = 0.5, p = 0.3: 0.5 * log(0.5 / 0.3) + 0.5 * log(0.5 / 0.7) = 0.087; of 0.1, 0.3: 0.116; of 0.1, 0.2: 0.0367.
# Geometric means: 1/2 of the first turn; the sampler is 4 times less sure of the second than the trainer.
CHUNKS = one(
    turn([2, 1 / 8], [-1, -2]),
    turn([0.5], [-1], sampled=[-1 + log(2) - log(4)]),
    turn([0.1], [3], starts_sample=True),
)
# Old log-probabilities less their mean of -3: 2, 2, 0, -4. Advantages 3, 1, -1, -3 have a mean of 0: 6, 2, 0 and 12.
COVARIANCES: list[dict[str, Any]] = one(
    {"old": [-1, -1], "logp": [-0.9, -0.9], "advantage": [3, 1]},
    {"old": [-3, -7, 9], "logp": [-2.9, -6.9, 9], "advantage": [-1, -3, 9], "mask": [1, 1, 0], "starts_sample": True},
)
UP = math.exp(0.1)
ENTROPIES: list[dict[str, Any]] = [
    {"turns": [{"logp": [-1] * 3, "advantage": [1, 2, 3], "entropy": [1, 3, 2]}]},
    {"turns": [{"logp": [-1] * 3, "advantage": [4, 5, 6], "entropy": [0.5, 3, 99], "mask": [1, 1, 0]}]},
]

CASES: Sequence[tuple[str, Mapping[str, Any], list[dict[str, Any]], Sequence[Sequence[float]], Sequence[Any]]] = [
    ("clipped", FREE, FOUR, [[-1.2, 2.0, -0.5, 0.8]], [[0, 2, -0.5, 0]]),
    ("clipped", {"clip_high": 0.5, **FREE}, FOUR, [[-1.5, 2.0, -0.5, 0.8]], [[0, 2, -0.5, 0]]),
    ("clipped", {"clip_low": 0.4, **FREE}, FOUR, [[-1.2, 2.0, -0.5, 0.6]], [[0, 2, -0.5, 0]]),
    ("clipped", {"ratio": "turn", **FREE}, TURNS, [[-0.5, 0.8, 4]], [[-0.5, 0, 4]]),
    ("clipped", {"ratio": "rollout", **FREE}, TURNS, [[-1, 1, 1]], [[-1, 1, 1]]),
    ("clipped", {}, FAR, [[6, 4, -1.2]], [[0, 4, 0]]),
    ("clipped", {"dual_clip": 1.5}, FAR, [[3, 3, -1.2]], [[0, 0, 0]]),
    ("reinforce", {}, FAR, [[-2, -2, 1]], [[2, 2, -1]]),
    ("imitation", {}, FAR, [[1, 1, 1]], [[-1, -1, -1]]),
    ("cispo", {}, WEIGHTED, [[2, -5, -0.2]], [[-2, 5, 0.2]]),
    ("cispo", {"clip_low": 0.5, "clip_high": 0.5}, WEIGHTED, [[1.5, -1.5, -1]], [[-1.5, 1.5, 1]]),
    ("topr", {}, TAPERED, [[-0.25, -0.5], [-2], [3]], [[0.25, 0.5], [1], [-3]]),
    ("topr", {"ratio": "geometric"}, TAPERED, [[-0.5, -1], [-2], [3]], [[0.5, 1], [1], [-3]]),
    ("topr", {"ratio": "token"}, TAPERED, [[-1, -0.25], [-2], [3]], [[1, 0.25], [1], [-3]]),
    ("kimi", {}, MIRROR, [[1.4, 2.4], [0.2]], [[-0.6, -0.6], [-0.2]]),
    ("kimi", {"tau": 0.2}, MIRROR, [[1.8, 2.8], [0.4]], [[-0.2, -0.2], [-0.4]]),
    # 4 / tau * sigmoid(0) = 2 / tau, with slope ratio * A = A; 4 * sigmoid(1), with slope 4 * s * (1 - s) * 2.
    ("sapo", {}, one(turn([1, 1], [2, -1])), [[-4, 2 / 1.05]], [[-2, 1]]),
    ("sapo", {}, one(turn([2], [1])), [[-4 * SIGMOID]], [[-8 * SIGMOID * (1 - SIGMOID)]]),
    ("sapo", {"tau_positive": 0.5, "tau_negative": 2}, one(turn([1, 1], [2, -1])), [[-8, 1]], [[-2, 1]]),
    ("dppo", {}, MASKED, [[-2, 0, 0, -0.6, 9]], [[-2, 0, 0, -0.6, 9]]),
    ("dppo", {"low": 0.25}, MASKED, [[-2, 0, 0.6, -0.6, 9]], [[-2, 0, 0.6, -0.6, 9]]),
    ("dppo", {"high": 0.25}, MASKED, [[-2, -3, 0, -0.6, 9]], [[-2, -3, 0, -0.6, 9]]),
    ("dppo", {"divergence": "kl"}, MASKED, [[-2, -3, 0.6, -0.6, 9]], [[-2, -3, 0.6, -0.6, 9]]),
    ("dppo", {"divergence": "kl", "low": 0.087, "high": 0.117}, MASKED, [[-2, -3, 0, -0.6, 9]], [[-2, -3, 0, -0.6, 9]]),
    (
        "dppo",
        {"divergence": "kl", "low": 0.088, "high": 0.116},
        MASKED,
        [[-2, 0, 0.6, -0.6, 9]],
        [[-2, 0, 0.6, -0.6, 9]],
    ),
    ("chunk_clipped", {}, CHUNKS, [[-0.5, -1, 0, 3]], [[0.5, 1, 0, -3]]),
    ("chunk_clipped", {"max_mismatch": 4.5}, CHUNKS, [[-0.5, -1, -0.5, 3]], [[0.5, 1, 0.5, -3]]),
    ("chunk_clipped", {"max_mismatch": None}, CHUNKS, [[-0.5, -1, -0.5, 3]], [[0.5, 1, 0.5, -3]]),
    # floor(2e-4 * 4) = 0 is one token. From 1 to 5, there is only 2.
    ("clip_cov", {}, COVARIANCES, [[-3 * UP, 0, UP, 3 * UP]], [[-3 * UP, 0, UP, 3 * UP]]),
    ("clip_cov", {"high": 20}, COVARIANCES, [[-3 * UP, -UP, UP, 0]], [[-3 * UP, -UP, UP, 0]]),
    ("clip_cov", {"low": 3}, COVARIANCES, [[-3 * UP, -UP, UP, 3 * UP]], [[-3 * UP, -UP, UP, 3 * UP]]),
    ("clip_cov", {"high": 20, "share": 0.6}, COVARIANCES, [[0, -UP, UP, 0]], [[0, -UP, UP, 0]]),
    # The token of covariance 12 also pays abs(0.1), with slope 1.
    ("kl_cov", {}, COVARIANCES, [[-3 * UP, -UP, UP, 3 * UP + 0.1]], [[-3 * UP, -UP, UP, 3 * UP + 1]]),
    (
        "kl_cov",
        {"share": 0.5},
        COVARIANCES,
        [[-3 * UP + 0.1, -UP, UP, 3 * UP + 0.1]],
        [[-3 * UP + 1, -UP, UP, 3 * UP + 1]],
    ),
    # No covariance is positive, so that no token pays.
    (
        "kl_cov",
        {},
        [{"turns": [{"logp": [-1.0, -2.0], "old": [-1.5, -2.5], "advantage": [0.0, 0.0]}]}],
        [[0, 0]],
        [[0, 0]],
    ),
    ("kl_cov", {"coefficient": 2}, COVARIANCES, [[-3 * UP, -UP, UP, 3 * UP + 0.2]], [[-3 * UP, -UP, UP, 3 * UP + 2]]),
    # floor(0.2 * 5) = 1 token, and the one that is equal to it; floor(0.6 * 5) = 3.
    ("top_entropy", {}, ENTROPIES, [[0, -2, 0], [0, -5]], [[0, -2, 0], [0, -5]]),
    ("top_entropy", {"share": 0.6}, ENTROPIES, [[0, -2, -3], [0, -5]], [[0, -2, -3], [0, -5]]),
]


@pytest.mark.parametrize(("kind", "settings", "rollouts", "losses", "gradient"), CASES)
def test_losses_and_gradients_worked_out_by_hand(
    kind: str,
    settings: Mapping[str, Any],
    rollouts: list[dict[str, Any]],
    losses: Sequence[Sequence[float]],
    gradient: Sequence[Sequence[float]],
) -> None:
    made = evaluate_part(kind, settings, rollouts)
    assert made.value == near(losses)
    assert made.gradient == near(gradient)


@pytest.mark.parametrize(
    ("kind", "settings", "rollouts", "clipped"),
    [
        ("clipped", FREE, FOUR, [True, False, False, True]),
        ("clipped", {}, FAR, [True, False, True]),
        ("cispo", {}, WEIGHTED, [False, True, False]),
        ("dppo", {}, MASKED, [False, True, True, False, False]),
        ("chunk_clipped", {}, CHUNKS, [False, False, True, False]),
        ("clip_cov", {}, COVARIANCES, [False, True, False, False]),
        ("kl_cov", {}, COVARIANCES, [False, False, False, True]),
        (
            "top_entropy",
            {"share": 0.25},
            [{"turns": [{"entropy": [2, 1, 0, 0], "logp": [0] * 4}]}],
            [False, True, True, True],
        ),
    ],
)
def test_clip_share_counts_the_tokens_whose_gradient_the_loss_limits(
    kind: str, settings: Mapping[str, Any], rollouts: list[dict[str, Any]], clipped: list[bool]
) -> None:
    assert evaluate_part(kind, settings, rollouts).metrics == {"clip_share": [clipped]}


def test_every_loss_and_every_key_is_in_the_table() -> None:
    keys = {(kind, key) for kind in kinds.names("losses") for key in kinds.find("losses", kind).section.model_fields}
    extended = {(kind, key) for kind in ("clip_cov", "top_entropy") for key in ClipKeys.model_fields}
    shown = {(kind, key) for kind, settings, *_ in CASES for key in ("kind", *settings)}
    assert keys == shown | extended


DIFFERENTIABLE = [
    *("clipped", "reinforce", "imitation", "kimi", "sapo", "dppo"),
    *("clip_cov", "kl_cov", "top_entropy"),
]


@pytest.mark.parametrize("kind", DIFFERENTIABLE)
@pytest.mark.parametrize("seed", range(2))
def test_the_gradient_is_the_slope_of_the_sum(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    rollouts = drawn.without_tools(drawn.cut(drawn.rollouts(rng), rng)[0])
    gradient = [value for row in evaluate_part(kind, {}, rollouts).gradient for value in row]
    # Along a random direction, a wrong gradient of any token changes the slope.
    direction = [rng.choice([-1, 1]) * rng.uniform(0.5, 1.5) for _ in gradient]

    def total(step: float) -> float:
        moved = drawn.moved(rollouts, [step * each for each in direction])
        return math.fsum(map(math.fsum, evaluate_part(kind, {}, moved).value))

    along = [each * slope for each, slope in zip(direction, gradient, strict=True)]
    slope = (total(STEP) - total(-STEP)) / (2 * STEP)
    assert math.fsum(along) == pytest.approx(slope, abs=1e-5 * math.fsum(map(abs, along)))


@pytest.mark.parametrize("kind", kinds.names("losses"))
def test_samples_order_and_tokens_of_tools_change_nothing(kind: str) -> None:
    rng = random.Random(0)
    rollouts = drawn.rollouts(rng)
    made, plain = evaluate_part(kind, {}, rollouts), evaluate_part(kind, {}, drawn.without_tools(rollouts))
    other, order = drawn.cut(rollouts, rng)
    again = evaluate_part(kind, {}, other)
    assert made.value == near(plain.value)
    assert made.gradient == near(plain.gradient)
    assert again.value == near([made.value[place] for place in order])
    assert again.gradient == near([made.gradient[place] for place in order])


@pytest.mark.parametrize("kind", kinds.names("losses"))
@pytest.mark.parametrize("gap", [200.0, math.inf])
def test_a_token_that_old_policy_and_sampler_found_almost_impossible_has_a_finite_loss(kind: str, gap: float) -> None:
    token = {"logp": [-0.5, -1.0], "old": [-gap, -1.0], "sampled": [-gap, -1.0], "reference": [-1.0, -1.0]}
    for advantage in ([-1.0, -1.0], [1.0, 1.0]):
        made = evaluate_part(kind, {}, one({**token, "entropy": [1.0, 0.5], "advantage": advantage}))
        assert all(map(math.isfinite, [*made.value[0], *made.gradient[0]]))
