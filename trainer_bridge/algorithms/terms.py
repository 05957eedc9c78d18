"""Terms and ratios of losses, and penalties of rewards. Axes: E episodes, N tokens or turns, V vocabulary; nats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from envkit.config.algorithm import KlSection, OverlongSection

from .returns import EPSILON

if TYPE_CHECKING:
    from .parts import Segments, Tensor, Tokens

RatioUnit: TypeAlias = Literal["token", "turn", "rollout"]
Mean: TypeAlias = Literal["product", "geometric"]
MAX_LOG_RATIO = 20.0
"""Bound on a log-ratio (nats), beyond which the exponential function would overflow or dwarf all other tokens."""
_MAX_CHANGE = 0.2
"""Maximum relative change of the coefficient over `KlSection.horizon` episodes."""


def overlong_penalty(tokens_E: Tensor, section: OverlongSection) -> Tensor:
    """Return the penalty of episodes with these numbers of policy tokens: from 0 to `section.penalty`, in float32."""
    over_E = (tokens_E - section.max_tokens + section.buffer_tokens).float()
    return section.penalty * (over_E / section.buffer_tokens).clamp(0.0, 1.0)


def value_loss(value_N: Tensor, target_N: Tensor, before_N: Tensor, clip: float | None) -> Tensor:
    """Return half the squared error of the critic's values; 0, without a gradient, where the target is nan.

    `clip` is how far a value may move from `before_N`, that before the train step: the larger of the errors with and
    without this bound counts (Schulman et al., PPO's published code). None: no bound.
    """
    known_N = ~target_N.isnan()
    target_N = target_N.where(known_N, value_N.detach())
    error_N = (value_N - target_N).square()
    if clip is not None:
        error_N = error_N.maximum((before_N + (value_N - before_N).clamp(-clip, clip) - target_N).square() * known_N)
    return 0.5 * error_N


def bounded_exp(difference_N: Tensor) -> Tensor:
    """Return exp(difference), for a difference between -20 and 20 nats; without a gradient beyond."""
    return difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def covariance(logp_N: Tensor, advantage_N: Tensor) -> Tensor:
    """Return each token's part in the covariance of log-probability and advantage: the product of what they are above
    their means over the N tokens, in float64 (Cui et al. 2025).
    """
    logp_N, advantage_N = logp_N.double(), advantage_N.double()
    return (logp_N - logp_N.mean()) * (advantage_N - advantage_N.mean())


def largest(value_N: Tensor, share: float) -> Tensor:
    """Return whether each value is one of the share of the largest ones: floor(share * N), one at least.

    All values that are equal to the smallest one of these count, too, so that the result does not depend on the order.
    -inf never counts.
    """
    least = value_N.topk(max(int(share * len(value_N) + EPSILON), 1)).values[-1]
    return (value_N >= least - EPSILON * least.abs().clamp(min=1.0)) & (value_N > -float("inf"))


def kl_estimate(logp_N: Tensor, reference_logp_N: Tensor, estimator: str = "k3") -> Tensor:
    """Return an estimate of KL(policy, reference) per token (Schulman 2020), with d = reference - logp.

        k1 = -d        k2 = d^2 / 2        k3 = exp(d) - d - 1

    k3 is never negative, and like k1 it is unbiased for samples of the policy. The gradients are another matter; see
    `envkit.config.algorithm.KlSection`.
    """
    difference_N = (reference_logp_N - logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -difference_N
    if estimator == "k2":
        return difference_N.square() / 2
    return difference_N.expm1() - difference_N  # exp() - 1 would lose all digits of a small difference


def kl_loss(tokens: Tokens, estimator: str) -> Tensor:
    """Return the estimate for each token of a loss; ``k3_unbiased`` is k3 times the ratio to the old policy."""
    assert tokens.reference_logp_N is not None
    kl_N = kl_estimate(tokens.logp_N, tokens.reference_logp_N, estimator)
    return kl_N * bounded_exp(tokens.logp_N - tokens.old_logp_N) if estimator == "k3_unbiased" else kl_N


def entropy(logp_NV: Tensor) -> Tensor:
    """Return the entropy of each distribution over the vocabulary V, in nats [N]."""
    return -(logp_NV.exp() * logp_NV).sum(-1)


class AdaptiveKl:
    """The weight of the divergence from the reference policy, which a target may change after each train step.

    Attributes:
        coefficient: The weight.
    """

    def __init__(self, section: KlSection) -> None:
        self._section = section
        self.coefficient = section.coefficient

    def adapt(self, divergence: float, episodes: int) -> None:
        """Adapt the weight to the mean divergence per token (nats) in a train step with this number of episodes."""
        section = self._section
        if section.target is not None:
            error = min(max(divergence / section.target - 1.0, -_MAX_CHANGE), _MAX_CHANGE)
            self.coefficient *= 1.0 + error * episodes / section.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


def ratio_needs(unit: RatioUnit) -> frozenset[str]:
    """Return the needs of a loss with ratios of this unit: ratios of a rollout need rollouts that are one sample."""
    return frozenset({"sequences"}) if unit == "rollout" else frozenset()


def log_ratio(tokens: Tokens, unit: RatioUnit) -> Tensor:
    """Return log(policy / old) of each token, or its mean over the token's turn or rollout.

    A mean is the value only; the gradient is that of the token's own log-probability (GSPO-token, Zheng et al. 2025,
    section 4.3), so that advantages may differ within a rollout. If they do not, the sum over the rollout of its
    tokens' gradients is that of GSPO.
    """
    own_N = tokens.logp_N - tokens.old_logp_N
    if unit == "token":
        return own_N
    mean_N = total(own_N.detach(), tokens.segments, unit, mean=True)
    return mean_N + tokens.logp_N - tokens.logp_N.detach()


def sampler_ratio(
    old_N: Tensor, sampled_N: Tensor, segments: Segments, unit: RatioUnit = "token", mean: Mean = "product"
) -> Tensor:
    """Return trainer / sampler for each token, or the product or geometric mean over its turn or rollout.

    The log-ratio, or its sum or mean, is between -20 and 20 nats.
    """
    log_ratio_N = old_N - sampled_N
    if unit != "token":
        log_ratio_N = total(log_ratio_N, segments, unit, mean=mean == "geometric")
    return bounded_exp(log_ratio_N)


def total(value_N: Tensor, segments: Segments, unit: Literal["turn", "rollout"], *, mean: bool = False) -> Tensor:
    """Return for each token the sum, or the mean, of the values of its turn or rollout. Gradients pass."""
    key_N = segments.rollout_N
    if unit == "turn":
        key_N = key_N * (int(segments.turn_N.max()) + 1 if len(key_N) else 1) + segments.turn_N
    place_N = _places(key_N)
    size_M = place_N.bincount()
    sum_M = value_N.new_zeros(len(size_M)).index_add(0, place_N, value_N)
    return (sum_M / size_M if mean else sum_M)[place_N]


def _places(key_N: Tensor) -> Tensor:
    """Return the number of each key, from 0, in the order of the keys."""
    sorted_N, order_N = key_N.sort()
    is_new_N = sorted_N.new_zeros(len(sorted_N))
    is_new_N[1:] = sorted_N[1:] != sorted_N[:-1]
    return is_new_N.new_empty(len(is_new_N)).scatter(0, order_N, is_new_N.cumsum(0))
