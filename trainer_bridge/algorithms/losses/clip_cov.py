"""Clip-Cov: no gradient for a few tokens of high covariance, which would reduce the entropy most."""

from __future__ import annotations

from typing import Literal

from envkit.config.grammar import PositiveShare

from ..parts import Part, PolicyLoss, Rollouts, Tensor, Tokens
from ..terms import covariance, largest, ratio_needs
from .clipped import ClipKeys, clipped


class ClipCov(ClipKeys):
    """The clipped ratio of PPO, without the tokens whose log-probability and advantage have a high covariance."""

    kind: Literal["clip_cov"] = "clip_cov"
    share: PositiveShare = 2e-4
    """Share of the tokens of a train step that are left out: one token at least."""
    low: float = 1.0
    """Least covariance of such a token."""
    high: float = 5.0
    """Greatest covariance of such a token."""


def prepare(rollouts: Rollouts, advantage_N: Tensor, section: ClipCov) -> Tensor:
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


PART = Part(
    clip_cov,
    ClipCov,
    lambda section: ratio_needs(section.ratio) | {"advantages"},
    "Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning, section 4",
    prepare,
)
