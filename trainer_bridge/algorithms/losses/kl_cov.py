"""KL-Cov: a penalty for a few tokens of high covariance, which would reduce the entropy most."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import LossSection
from envkit.config.grammar import PositiveShare, Rate

from ..parts import Part, PolicyLoss, Rollouts, Tensor, Tokens
from ..returns import EPSILON
from ..terms import MAX_LOG_RATIO, covariance, largest


class KlCov(LossSection):
    """The ratio to the old policy, and a penalty for the tokens whose log-probability and advantage have the highest
    covariance. The ratio is not clipped.
    """

    kind: Literal["kl_cov"] = "kl_cov"
    share: PositiveShare = 2e-3
    """Share of the tokens of a train step that have the penalty: one token at least, if a covariance is positive."""
    coefficient: Rate = 1.0
    """Weight of the penalty."""


def prepare(rollouts: Rollouts, advantage_N: Tensor, section: KlCov) -> Tensor:
    """Return 1 for the tokens with the greatest positive covariances, otherwise 0 [N]."""
    value_N = covariance(rollouts.old_logp_N, advantage_N)
    return largest(value_N.where(value_N > EPSILON, -float("inf")), section.share).to(advantage_N.dtype)


def kl_cov(tokens: Tokens, section: KlCov) -> PolicyLoss:
    """Return -ratio * A per token, plus coefficient * abs(logp - old_logp) for the chosen tokens (`clip_share`)."""
    assert tokens.prepared_N is not None
    difference_N = (tokens.logp_N - tokens.old_logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    penalty_N = section.coefficient * tokens.prepared_N * difference_N.abs()
    return PolicyLoss(penalty_N - difference_N.exp() * tokens.advantage_N, {"clip_share": tokens.prepared_N > 0})


PART = Part(
    kl_cov,
    KlCov,
    source="Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning, section 4",
    prepare=prepare,
)
