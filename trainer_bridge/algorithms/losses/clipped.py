"""Losses of the bounded ratio: PPO's clip with a bound for negative advantages, a soft gate, and trust regions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from envkit.config.algorithm import LossSection
from envkit.config.grammar import Rate, Share

from ..parts import Part, PolicyLoss, Tokens
from ..terms import MAX_LOG_RATIO, RatioUnit, bounded_exp, log_ratio, ratio_needs

if TYPE_CHECKING:
    from torch import Tensor


class ClipKeys(LossSection):
    """The keys of `clipped`, which losses that extend it have, too."""

    ratio: RatioUnit = "token"
    """The ratio to the old policy: of each token, or the geometric mean over its turn or its whole rollout (GSPO)."""
    clip_low: Annotated[Share, Field(gt=0)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Rate = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Maximum of the ratio for negative advantages, so that a token which the sampler found unlikely cannot dominate an
    update. null: no maximum, but log-ratios are at most 20 nats."""


class Clipped(ClipKeys):
    """The clipped ratio of PPO."""

    kind: Literal["clipped"] = "clipped"


def clipped(tokens: Tokens, section: ClipKeys) -> PolicyLoss:
    """Return PPO's clipped surrogate loss per token, and whether each token's ratio is clipped (`clip_share`).

        ratio = exp(clamp(logp - old_logp, -20, 20))
        loss  = -min(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A)

    For A < 0, this loss grows with the ratio. `dual_clip` bounds it (Ye et al. 2020): loss <= dual_clip * abs(A).
    """
    difference_N, advantage_N = log_ratio(tokens, section.ratio), tokens.advantage_N
    whole_N = bounded_exp(difference_N)
    ratio_N = whole_N.clamp(max=section.dual_clip).where(advantage_N < 0, whole_N) if section.dual_clip else whole_N
    free_N = ratio_N * advantage_N
    held_N = ratio_N.clamp(1 - section.clip_low, 1 + section.clip_high) * advantage_N
    clipped_N = (held_N < free_N) | (ratio_N < whole_N) | (difference_N.abs() > MAX_LOG_RATIO)
    return PolicyLoss(-free_N.minimum(held_N), {"clip_share": clipped_N.detach()})


CLIPPED = Part(
    clipped,
    Clipped,
    lambda section: ratio_needs(section.ratio) | {"advantages"},
    "Schulman et al. 2017, equation 7; Ye et al. 2020, equation 5; Zheng et al. 2025, GSPO-token",
)


class Sapo(LossSection):
    """A sigmoid of the ratio, whose gradient decreases smoothly with the distance from the old policy."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: Rate = 1.0
    """Steepness of the gate for positive advantages."""
    tau_negative: Rate = 1.05
    """Steepness of the gate for negative advantages; larger, because they make training less stable."""


def sapo(tokens: Tokens, section: Sapo) -> PolicyLoss:
    """Return SAPO's loss per token.

        ratio = exp(logp - old_logp)
        loss  = -4 / tau * sigmoid(tau * (ratio - 1)) * A

    Tau depends on the sign of the advantage. At ratio 1, the gradient is that of the ratio itself.
    """
    advantage_N = tokens.advantage_N
    tau_N = advantage_N.new_full(advantage_N.shape, section.tau_negative)
    tau_N = tau_N.where(advantage_N <= 0, section.tau_positive)
    ratio_N = bounded_exp(tokens.logp_N - tokens.old_logp_N)
    return PolicyLoss(-4 / tau_N * (tau_N * (ratio_N - 1)).sigmoid() * advantage_N)


SAPO = Part(
    sapo, Sapo, frozenset({"advantages"}), "Gao et al. 2025, Soft Adaptive Policy Optimization, equations 5 to 7"
)


_LEAST_REST = 1e-8
"""Least probability of all other tokens, so that its logarithm is finite."""


class Dppo(LossSection):
    """The ratio to the sampler's probability, except for tokens that the update would move out of a trust region. The
    ratio already makes up for the sampler: use no correction.
    """

    kind: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """The divergence between sampler and policy, if a distribution is only over the token and all others together: tv
    is the difference of the token's probabilities, kl is KL(sampler, policy)."""
    low: Rate = 0.15
    """Maximum divergence of a token with a smaller probability than the sampler's. 0.05 is usual with kl."""
    high: Rate = 0.15
    """Maximum divergence of a token with a larger probability than the sampler's. 0.05 is usual with kl."""


def dppo(tokens: Tokens, section: Dppo) -> PolicyLoss:
    """Return DPPO's loss per token, and whether each token is masked (`clip_share`).

        ratio = exp(logp - sampled_logp)
        loss  = -mask * ratio * A

    The mask is 0 if A > 0, ratio > 1 and divergence > high, or if A < 0, ratio < 1 and divergence > low; otherwise 1.
    With p = exp(logp) and q = exp(sampled_logp), the divergence is abs(p - q), or
    q * log(q / p) + (1 - q) * log((1 - q) / (1 - p)).
    """
    logp_N, sampled_N, advantage_N = tokens.logp_N.detach(), tokens.sampled_logp_N, tokens.advantage_N
    difference_N = (logp_N - sampled_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if section.divergence == "tv":
        divergence_N = (logp_N.exp() - sampled_N.exp()).abs()
    else:
        rest_N = -sampled_N.expm1()
        divergence_N = rest_N * (_log_rest(sampled_N) - _log_rest(logp_N)) - sampled_N.exp() * difference_N
    is_above_N = (advantage_N > 0) & (difference_N > 0) & (divergence_N > section.high)
    is_below_N = (advantage_N < 0) & (difference_N < 0) & (divergence_N > section.low)
    is_masked_N = is_above_N | is_below_N
    loss_N = -bounded_exp(tokens.logp_N - sampled_N) * advantage_N
    return PolicyLoss(loss_N * ~is_masked_N, {"clip_share": is_masked_N})


def _log_rest(logp_N: Tensor) -> Tensor:
    """Return the log-probability of all other tokens."""
    return (-logp_N.expm1()).clamp(min=_LEAST_REST).log()


DPPO = Part(
    dppo,
    Dppo,
    frozenset({"advantages"}),
    "Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning",
)
