"""Losses with their gradients, aggregations and corrections: worked out by hand, and against slow implementations."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from envkit.config import kinds
from envkit.trainer_bridge.algorithms.terms import entropy, kl_estimate, value_loss
from tests.golden import slow
from tests.golden.parts import Loss, part

SEEDS = range(10)
STEP = 1e-5
"""Half-width of the difference that stands for a derivative."""


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def gradient(loss_N: Tensor, of: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss_N.sum(), of)
    values: list[float] = found.tolist()
    return values


def slope(function: Callable[[float], float], at: float) -> float:
    return (function(at + STEP) - function(at - STEP)) / (2 * STEP)


def near(*values: float) -> list[object]:
    return [pytest.approx(value, rel=1e-6, abs=1e-9) for value in values]


# --- The clipped ratio -----------------------------------------------------------------------------------------------


NO_BOUND = 1e9


def clipped(logp: Sequence[float], old: Sequence[float], advantage: Sequence[float], **keys: float) -> Loss:
    made: Loss = part("losses", {"kind": "clipped", "dual_clip": NO_BOUND, **keys}, logp, old, advantage)
    return made


def test_the_four_cases_of_the_trust_region() -> None:
    # ratios 2, 2, 0.5 and 0.5 at a clip of 0.2; A = +1, -1, +1, -1.
    # +1, 2:   min(2, 1.2) = 1.2, held back           -1, 2:   min(-2, -1.2) = -2, free
    # +1, 0.5: min(0.5, 0.8) = 0.5, free              -1, 0.5: min(-0.5, -0.8) = -0.8, held back
    logp = [math.log(0.2), math.log(0.2), math.log(0.05), math.log(0.05)]
    made = clipped(logp, [math.log(0.1)] * 4, [1, -1, 1, -1])
    assert made.losses == near(-1.2, 2.0, -0.5, 0.8)
    assert made.metrics == {"clip_share": [True, False, False, True]}
    # The slope of -ratio * A is -ratio * A itself, since ratio = exp(logp - old).
    assert made.gradient == near(0.0, 2.0, -0.5, 0.0)


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    # ratios e**2 = 7.4, 2, e**2 and 0.5 at a bound of 3: A = -2 gives min(2 * 7.4, 2 * 3) = 6 without a gradient, and
    # 2 * 2 = 4 with one. A = +1 is held back at 1.2, and A = -1 at 0.8, as without the bound.
    logp, old = [-1.0, math.log(0.2), -1.0, math.log(0.05)], [-3.0, math.log(0.1), -3.0, math.log(0.1)]
    made = clipped(logp, old, [-2, -2, 1, -1], dual_clip=3.0)
    assert made.losses == near(6.0, 4.0, -1.2, 0.8)
    assert made.gradient == near(0.0, 4.0, 0.0, 0.0)
    assert made.metrics["clip_share"] == [True, False, True, True]


@pytest.mark.parametrize("dual_clip", [NO_BOUND, 3.0])
@pytest.mark.parametrize("gap", [30.0, 200.0, math.inf])
def test_a_token_that_the_sampler_found_almost_impossible_has_a_finite_loss(gap: float, dual_clip: float) -> None:
    made = clipped([0.0, 0.0, -1.0], [-gap, -gap, -1.0], [-1.0, 1.0, -1.0], dual_clip=dual_clip)
    assert made.losses == near(min(dual_clip, math.exp(20.0)), -1.2, 1.0)
    assert made.gradient == near(0.0, 0.0, 1.0)
    assert made.metrics["clip_share"] == [True, True, False]


@pytest.mark.parametrize("dual_clip", [NO_BOUND, 3.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_clipped_loss_and_its_gradient_agree_with_the_slow_ones(seed: int, dual_clip: float) -> None:
    rng = random.Random(seed)
    rows = [(rng.uniform(-4, 0), rng.uniform(-4, 0), rng.gauss(0, 2)) for _ in range(50)]
    clip = rng.choice([0.1, 0.2, 0.3])
    made = clipped(*map(list, zip(*rows, strict=True)), clip=clip, dual_clip=dual_clip)
    slow_loss = partial(slow.clipped, clip=clip, dual_clip=dual_clip)
    assert made.losses == near(*(slow_loss(*row) for row in rows))
    slopes = [slope(partial(slow_loss, old_logp=old, advantage=a), at) for at, old, a in rows]
    assert made.gradient == [pytest.approx(value, rel=1e-4, abs=1e-6) for value in slopes]


# --- Other losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_agrees_with_the_slow_one(seed: int) -> None:
    rng = random.Random(seed)
    logp, advantage = [rng.uniform(-4, 0) for _ in range(50)], [rng.gauss(0, 2) for _ in range(50)]
    made = part("losses", "reinforce", logp, [0.0] * 50, advantage)
    assert made.losses == near(*map(slow.reinforce, logp, advantage))


def test_imitation_pays_the_negative_log_probability_whatever_the_advantage() -> None:
    assert part("losses", "imitation", [-0.5, -2.0], [-9.0, 0.0], [3.0, 0.0]) == Loss([0.5, 2.0], {}, [-1.0, -1.0])


def test_the_critic_pays_half_the_squared_error() -> None:
    value = tensor(3.0, -1.0)
    loss_N = value_loss(value, tensor(1.0, 0.0).detach())
    assert loss_N.tolist() == near(2.0, 0.5)
    assert gradient(loss_N, value) == near(2.0, -1.0)


# --- KL and entropy --------------------------------------------------------------------------------------------------


def test_the_k3_estimate_of_a_token_that_the_reference_finds_absurd_is_finite() -> None:
    assert kl_estimate(tensor(-200.0, 0.0), tensor(0.0, -200.0)).isfinite().all()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_k3_estimate_agrees_with_the_slow_one(seed: int) -> None:
    rng = random.Random(seed)
    rows = [(rng.uniform(-4, 0), rng.uniform(-4, 0)) for _ in range(50)]
    logp, reference = (tensor(*column) for column in zip(*rows, strict=True))
    assert kl_estimate(logp, reference).tolist() == near(*(slow.k3(*row) for row in rows))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_k3_estimate_is_the_divergence_on_average_over_the_policy(seed: int) -> None:
    rng = random.Random(seed)
    policy, reference = (torch.tensor([rng.uniform(0.05, 1) for _ in range(9)], dtype=torch.float64) for _ in "pr")
    policy, reference = policy / policy.sum(), reference / reference.sum()
    estimate = (policy * kl_estimate(policy.log(), reference.log())).sum().item()
    assert estimate == pytest.approx(slow.kl(policy.tolist(), reference.tolist()), rel=1e-9)


def test_entropy_of_a_fair_coin_a_fair_die_and_a_certainty() -> None:
    third = [1 / 3] * 3
    rows = torch.tensor([[0.5, 0.5, 1e-300], third, [1.0, 1e-300, 1e-300]], dtype=torch.float64)
    assert entropy(rows.log()).tolist() == near(math.log(2), math.log(3), 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_entropy_and_its_gradient_agree_with_the_slow_one(seed: int) -> None:
    rng = random.Random(seed)
    logits = [rng.gauss(0, 2) for _ in range(7)]

    def slow_entropy(position: int, logit: float) -> float:
        weights = [math.exp(logit if place == position else one) for place, one in enumerate(logits)]
        return slow.entropy([weight / math.fsum(weights) for weight in weights])

    logit_V = tensor(*logits)
    entropy_1 = entropy(torch.log_softmax(logit_V[None], dim=-1))
    assert entropy_1.item() == pytest.approx(slow_entropy(0, logits[0]), rel=1e-9)
    slopes = [slope(partial(slow_entropy, place), logits[place]) for place in range(7)]
    assert gradient(entropy_1, logit_V) == [pytest.approx(value, rel=1e-4, abs=1e-7) for value in slopes]


# --- Aggregations and corrections ------------------------------------------------------------------------------------


def test_tokens_or_rollouts_count_the_same() -> None:
    # Rollouts of three, one and two tokens: all six tokens, or each rollout a third.
    rollouts = [4, 4, 0, 4, 7, 7]
    assert part("aggregations", "token_mean", rollouts) == near(*[1 / 6] * 6)
    assert part("aggregations", "rollout_mean", rollouts) == near(1 / 9, 1 / 9, 1 / 3, 1 / 9, 1 / 6, 1 / 6)


@pytest.mark.parametrize("kind", kinds.names("aggregations"))
@given(data=st.data())
def test_the_weights_of_a_mean_sum_to_one_and_do_not_depend_on_samples_or_order(kind: str, data: st.DataObject) -> None:
    rollouts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=60))
    samples = data.draw(st.permutations(range(len(rollouts))))
    order = data.draw(st.permutations(range(len(rollouts))))
    weights = part("aggregations", kind, rollouts)
    assert math.fsum(weights) == pytest.approx(1.0, abs=1e-12)
    assert part("aggregations", kind, rollouts, samples) == weights
    assert part("aggregations", kind, [rollouts[place] for place in order]) == [weights[place] for place in order]
    assert part("aggregations", kind, []) == []


def test_truncated_importance_sampling_is_the_ratio_up_to_the_cap() -> None:
    # Ratios e**0 = 1, 0.5, 3 and, for a token that the sampler found impossible, infinite; the cap is 2, or 4.
    old, sampled = [-1.0, math.log(0.1), math.log(0.3), -1.0], [-1.0, math.log(0.2), math.log(0.1), -math.inf]
    assert part("corrections", "tis", old, sampled) == near(1.0, 0.5, 2.0, 2.0)
    assert part("corrections", {"kind": "tis", "cap": 4.0}, old, sampled) == near(1.0, 0.5, 3.0, 4.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_truncated_importance_sampling_agrees_with_the_slow_one(seed: int) -> None:
    rng = random.Random(seed)
    old, sampled = ([rng.uniform(-4, 0) for _ in range(50)] for _ in "os")
    factors = part("corrections", {"kind": "tis", "cap": 1.5}, old, sampled)
    assert factors == near(*(slow.tis(*pair, cap=1.5) for pair in zip(old, sampled, strict=True)))
