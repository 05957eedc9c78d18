"""Losses that treat some tokens of a train step differently, which `Part.prepare` chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from envkit.config.algorithm import LossSection
from envkit.config.grammar import Rate, Share

from ..parts import Part, PolicyLoss, Rollouts, Tokens
from ..returns import EPSILON
from ..terms import MAX_LOG_RATIO, covariance, largest, ratio_needs
from .clipped import ClipKeys, clipped

if TYPE_CHECKING:
    from torch import Tensor


class ClipCov(ClipKeys):
    """The clipped ratio of PPO, without the tokens whose log-probability and advantage have a high covariance."""

    kind: Literal["clip_cov"] = "clip_cov"
    share: Annotated[Share, Field(gt=0)] = 2e-4
    """Share of the tokens of a train step that are left out: one token at least."""
    low: float = 1.0
    """Least covariance of such a token."""
    high: float = 5.0
    """Greatest covariance of such a token."""


def _least_wanted(rollouts: Rollouts, advantage_N: Tensor, section: ClipCov) -> Tensor:
    """Return 1 for the tokens that are left out, otherwise 0 [N].

    They are those of the greatest covariances from `low` to `high`. The paper draws them at random from this range;
    here the result does not depend on the order of the tokens.
    """
    value_N = covariance(rollouts.old_logp_N, advantage_N)
    is_candidate_N = (value_N >= section.low) & (value_N <= section.high)
    return largest(value_N.where(is_candidate_N, -float("inf")), section.share).to(advantage_N.dtype)


def clip_cov(tokens: Tokens, section: ClipCov) -> PolicyLoss:
    """Return the loss of `clipped` per token, or 0 if it is left out, and whether either applies (`clip_share`)."""
    assert tokens.prepared_N is not None
    plain = clipped(tokens, section)
    is_left_out_N = tokens.prepared_N > 0
    return PolicyLoss(plain.loss_N * ~is_left_out_N, {"clip_share": plain.metrics["clip_share"] | is_left_out_N})


CLIP_COV = Part(
    clip_cov,
    ClipCov,
    lambda section: ratio_needs(section.ratio) | {"advantages"},
    "Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning, section 4",
    _least_wanted,
)


class KlCov(LossSection):
    """The ratio to the old policy, and a penalty for the tokens whose log-probability and advantage have the highest
    covariance. The ratio is not clipped.
    """

    kind: Literal["kl_cov"] = "kl_cov"
    share: Annotated[Share, Field(gt=0)] = 2e-3
    """Share of the tokens of a train step that have the penalty: one token at least, if a covariance is positive."""
    coefficient: Rate = 1.0
    """Weight of the penalty."""


def _penalised(rollouts: Rollouts, advantage_N: Tensor, section: KlCov) -> Tensor:
    """Return 1 for the tokens with the greatest positive covariances, otherwise 0 [N]."""
    value_N = covariance(rollouts.old_logp_N, advantage_N)
    return largest(value_N.where(value_N > EPSILON, -float("inf")), section.share).to(advantage_N.dtype)


def kl_cov(tokens: Tokens, section: KlCov) -> PolicyLoss:
    """Return -ratio * A per token, plus coefficient * abs(logp - old_logp) for the chosen tokens (`clip_share`)."""
    assert tokens.prepared_N is not None
    difference_N = (tokens.logp_N - tokens.old_logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    penalty_N = section.coefficient * tokens.prepared_N * difference_N.abs()
    return PolicyLoss(penalty_N - difference_N.exp() * tokens.advantage_N, {"clip_share": tokens.prepared_N > 0})


KL_COV = Part(
    kl_cov,
    KlCov,
    source="Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning, section 4",
    prepare=_penalised,
)


class TopEntropy(ClipKeys):
    """The clipped ratio of PPO, only of the tokens of a train step with the highest entropies."""

    kind: Literal["top_entropy"] = "top_entropy"
    share: Annotated[Share, Field(gt=0)] = 0.2
    """Share of the tokens that the policy learns from. The others still count in the denominators of means."""


def _undecided(rollouts: Rollouts, advantage_N: Tensor, section: TopEntropy) -> Tensor:
    """Return 1 for the tokens with the highest entropies of the old policy, otherwise 0 [N]."""
    assert rollouts.entropy_N is not None
    return largest(rollouts.entropy_N, section.share).to(advantage_N.dtype)


def top_entropy(tokens: Tokens, section: TopEntropy) -> PolicyLoss:
    """Return the loss of `clipped` for the chosen tokens, otherwise 0, and where either is held back (`clip_share`)."""
    assert tokens.prepared_N is not None
    plain = clipped(tokens, section)
    is_chosen_N = tokens.prepared_N > 0
    return PolicyLoss(plain.loss_N * is_chosen_N, {"clip_share": plain.metrics["clip_share"] | ~is_chosen_N})


TOP_ENTROPY = Part(
    top_entropy,
    TopEntropy,
    lambda section: ratio_needs(section.ratio) | {"advantages", "recomputed"},
    "Wang et al. 2025, Beyond the 80/20 Rule, equation 5",
    _undecided,
)
