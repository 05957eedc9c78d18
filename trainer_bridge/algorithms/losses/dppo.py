"""DPPO: a trust region of a divergence, not of the ratio."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import LossSection
from envkit.config.grammar import Rate

from ..parts import Part, PolicyLoss, Tensor, Tokens
from ..terms import MAX_LOG_RATIO, bounded_exp

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


PART = Part(
    dppo,
    Dppo,
    frozenset({"advantages"}),
    "Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning",
)
