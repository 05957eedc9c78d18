"""Terms of losses, and penalties of rewards. Axes: E episodes, N tokens or turns, V vocabulary. Units: nats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envkit.config.algorithm import KlSection, OverlongSection

from .returns import EPSILON

if TYPE_CHECKING:
    from torch import Tensor

    from .parts import Tokens

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

    Args:
        value_N: The values.
        target_N: What they should be.
        before_N: The values before the train step.
        clip: How far a value may move from `before_N`: the larger of the errors with and without this bound counts
            (Schulman et al., PPO's published code). None: no bound.
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
