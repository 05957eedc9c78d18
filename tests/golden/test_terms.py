"""Terms of losses and penalties of rewards: worked out by hand, and exact expectations over a small distribution."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from envkit.config.algorithm import KlSection, OverlongSection
from envkit.trainer_bridge.algorithms.parts import Segments, Tokens
from envkit.trainer_bridge.algorithms.terms import (
    AdaptiveKl,
    bounded_exp,
    covariance,
    entropy,
    kl_estimate,
    kl_loss,
    largest,
    overlong_penalty,
    value_loss,
)
from tests.golden import slow

SEEDS = range(5)
STEP = 1e-5
"""Half-width of the difference that stands for a derivative."""


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def gradient(loss_N: Tensor, of: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss_N.sum(), of)
    values: list[float] = found.tolist()
    return values


def near(*values: float) -> object:
    return pytest.approx(list(values), rel=1e-6, abs=1e-9)


# --- The critic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip", "losses", "slopes"),
    [
        # (3 - 1)^2 / 2 = 2, (-1 - 0)^2 / 2 = 0.5 and, without a target, 0; the slopes are the errors.
        (None, [2.0, 0.5, 0.0], [2.0, -1.0, 0.0]),
        # Before, the values were 1.5 and 1. They may move to 2.5 (error 1.5 < 2, so that 2 counts), and to 0 (error 0).
        (1.0, [2.0, 0.5, 0.0], [2.0, -1.0, 0.0]),
        # From 4, the first may move to 3.5: (3.5 - 1)^2 / 2 = 3.125 without a slope.
        (0.5, [3.125, 0.5, 0.0], [0.0, -1.0, 0.0]),
    ],
)
def test_the_critic_has_half_the_squared_error(clip: float | None, losses: list[float], slopes: list[float]) -> None:
    value_N, before = tensor(3.0, -1.0, 5.0), 4.0 if clip == 0.5 else 1.5
    loss_N = value_loss(value_N, tensor(1.0, 0.0, math.nan).detach(), tensor(before, 1.0, -9.0).detach(), clip)
    assert loss_N.tolist() == near(*losses)
    assert gradient(loss_N, value_N) == near(*slopes)


# --- KL and entropy --------------------------------------------------------------------------------------------------


def distributions(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a policy, and the probabilities of an old policy and of a reference policy."""
    rng = random.Random(seed)
    logit_V, *others = (torch.tensor([rng.gauss(0, 1) for _ in range(6)], dtype=torch.float64) for _ in "por")
    old_V, reference_V = (one.softmax(0) for one in others)
    return logit_V.requires_grad_(), old_V, reference_V


def tokens_of(logp_N: Tensor, old_N: Tensor, reference_N: Tensor) -> Tokens:
    number_N = torch.arange(len(logp_N))
    zero_N = torch.zeros_like(old_N)
    segments = Segments(number_N, number_N, number_N, number_N)
    return Tokens(logp_N, old_N, old_N, reference_N, zero_N, zero_N, segments)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # d = log(reference / policy) = -log(2), and for the second token log(4).
    [
        ("k1", [math.log(2), -math.log(4)]),
        ("k2", [math.log(2) ** 2 / 2, math.log(4) ** 2 / 2]),
        ("k3", [0.5 - 1 + math.log(2), 4 - 1 - math.log(4)]),
    ],
)
def test_estimates_worked_out_by_hand(estimator: str, expected: list[float]) -> None:
    estimate_N = kl_estimate(tensor(-1.0, -2.0), tensor(-1 - math.log(2), -2 + math.log(4)), estimator)
    assert estimate_N.tolist() == near(*expected)


def test_k3_unbiased_is_k3_times_the_ratio_in_value_and_gradient() -> None:
    # d = -log(2): k3 = log(2) - 1/2, with slope 1 - exp(d) = 1/2 by logp. The ratio is 3, with slope 3.
    logp_N = tensor(-1.0)
    tokens = tokens_of(logp_N, tensor(-1 - math.log(3)).detach(), tensor(-1 - math.log(2)).detach())
    k3 = math.log(2) - 0.5
    loss_N = kl_loss(tokens, "k3_unbiased")
    assert loss_N.tolist() == near(3 * k3)
    assert gradient(loss_N, logp_N) == near(3 * k3 + 3 * 0.5)


def _forward(policy_V: Tensor, reference_V: Tensor) -> Tensor:
    return (policy_V * (policy_V / reference_V).log()).sum()


def _backward(policy_V: Tensor, reference_V: Tensor) -> Tensor:
    return (reference_V * (reference_V / policy_V).log()).sum()


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [("k1", None), ("k2", _forward), ("k3", _backward), ("k3_unbiased", _forward)],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_which_divergence_the_expected_gradient_of_an_estimator_descends(
    estimator: str, divergence: Callable[[Tensor, Tensor], Tensor] | None, seed: int
) -> None:
    logit_V, _, reference_V = distributions(seed)
    logp_V = logit_V.log_softmax(0)
    policy_V = logp_V.exp().detach()  # the tokens are samples of the policy
    tokens = tokens_of(logp_V, logp_V.detach(), reference_V.log())
    found = gradient(policy_V * kl_loss(tokens, estimator), logit_V)
    expected = [0.0] * 6
    if divergence is not None:
        expected = gradient(divergence(logit_V.softmax(0), reference_V), logit_V)
    assert found == near(*expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_k3_unbiased_descends_the_same_divergence_with_samples_of_an_older_policy(seed: int) -> None:
    logit_V, old_V, reference_V = distributions(seed)
    tokens = tokens_of(logit_V.log_softmax(0), old_V.log(), reference_V.log())
    loss_V = old_V * kl_loss(tokens, "k3_unbiased")
    divergence = _forward(logit_V.softmax(0), reference_V)
    assert loss_V.sum().item() == pytest.approx(divergence.item(), rel=1e-9)
    assert gradient(loss_V, logit_V) == near(*gradient(divergence, logit_V))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", SEEDS)
def test_k1_and_k3_are_the_divergence_on_average_over_the_policy(estimator: str, seed: int) -> None:
    logit_V, _, reference_V = distributions(seed)
    policy_V = logit_V.detach().softmax(0)
    estimate = float((policy_V * kl_estimate(policy_V.log(), reference_V.log(), estimator)).sum())
    assert estimate == pytest.approx(slow.kl(policy_V.tolist(), reference_V.tolist()), rel=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_estimate_of_a_token_that_the_reference_finds_absurd_is_finite(estimator: str) -> None:
    assert kl_estimate(tensor(-200.0, 0.0), tensor(0.0, -200.0), estimator).isfinite().all()


def test_exponentials_are_bounded_by_20_nats_and_have_a_gradient_within() -> None:
    difference_N = tensor(1.0, 19.0, 21.0, math.inf, -math.inf)
    e, bound = math.exp, math.exp(20)
    assert bounded_exp(difference_N).tolist() == near(e(1), e(19), bound, bound, 1 / bound)
    assert gradient(bounded_exp(difference_N), difference_N) == near(e(1), e(19), 0, 0, 0)


def test_entropy_of_a_fair_coin_a_fair_die_and_a_certainty() -> None:
    rows = torch.tensor([[0.5, 0.5, 1e-300], [1 / 3] * 3, [1.0, 1e-300, 1e-300]], dtype=torch.float64)
    assert entropy(rows.log()).tolist() == near(math.log(2), math.log(3), 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_of_the_entropy_is_its_slope(seed: int) -> None:
    logit_V, *_ = distributions(seed)

    def moved(place: int, step: float) -> float:
        probability_V = (logit_V.detach() + step * torch.eye(6, dtype=torch.float64)[place]).softmax(0)
        return slow.entropy(probability_V.tolist())

    slopes = [(moved(place, STEP) - moved(place, -STEP)) / (2 * STEP) for place in range(6)]
    found = gradient(entropy(logit_V.log_softmax(0)[None]), logit_V)
    assert found == pytest.approx(slopes, rel=1e-4, abs=1e-7)


# --- Ranks -----------------------------------------------------------------------------------------------------------


def test_covariances_are_products_of_what_is_above_the_means() -> None:
    # Means -3 and 0: 2 * 3, 2 * 1, 0 * -1, -4 * -3.
    assert covariance(tensor(-1, -1, -3, -7), tensor(3, 1, -1, -3)).tolist() == near(6, 2, 0, 12)


@pytest.mark.parametrize(
    ("values", "share", "chosen"),
    [
        ([1, 4, 3, 2], 0.5, [0, 1, 1, 0]),
        ([1, 4, 3, 2], 0.01, [0, 1, 0, 0]),  # one at least
        ([1, 3, 3 + 1e-9, 3], 0.25, [0, 1, 1, 1]),  # values that are equal but for rounding errors count together
        ([1, -math.inf, -math.inf, 0], 1.0, [1, 0, 0, 1]),
        ([-math.inf] * 3, 0.5, [0, 0, 0]),
    ],
)
def test_the_largest_share_of_values(values: list[float], share: float, chosen: list[bool]) -> None:
    assert largest(torch.tensor(values, dtype=torch.float64), share).tolist() == [bool(one) for one in chosen]


# --- Penalties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("penalty", "factor"), [(1.0, 1.0), (0.5, 0.5)])
def test_the_overlong_penalty_rises_over_the_buffer_to_its_maximum(penalty: float, factor: float) -> None:
    # From 100 - 20 = 80 tokens on: 0 at 80, 5 / 20 at 85, 1 at 100 and beyond.
    section = OverlongSection(max_tokens=100, buffer_tokens=20, penalty=penalty)
    found = overlong_penalty(torch.tensor([1, 80, 85, 100, 101, 900]), section).tolist()
    assert found == near(0, 0, 0.25 * factor, factor, factor, factor)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 50 / 1000)),
        (0.3, 0.5 * (1 + 0.2 * 50 / 1000)),  # at most 20 % over the horizon
        (0.0, 0.5 * (1 - 0.2 * 50 / 1000)),
    ],
)
def test_the_weight_of_the_divergence_is_adapted_to_the_target(divergence: float, expected: float) -> None:
    adaptive = AdaptiveKl(KlSection(coefficient=0.5, target=0.1, horizon=1000))
    adaptive.adapt(divergence, episodes=50)
    assert adaptive.coefficient == pytest.approx(expected, rel=1e-12)
    other = AdaptiveKl(KlSection(coefficient=0.5, target=0.1))
    other.load_state_dict(adaptive.state_dict())
    assert other.coefficient == adaptive.coefficient


def test_without_a_target_the_weight_of_the_divergence_is_constant() -> None:
    adaptive = AdaptiveKl(KlSection(coefficient=0.5))
    adaptive.adapt(9.0, episodes=50)
    assert adaptive.coefficient == 0.5
