"""KL-Cov: a penalty for a few tokens of high covariance, which would reduce the entropy most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from envkit.config.grammar import Rate, Share

from ..parts import Part, PolicyLoss, Rollouts, Tokens
from ..ratios import ratio_needs
from ..terms import MAX_LOG_RATIO, covariance, largest
from .clipped import ClipKeys, clipped

if TYPE_CHECKING:
    from torch import Tensor


class KlCov(ClipKeys):
    """The clipped ratio of PPO, with a penalty for the tokens whose log-probability and advantage have the highest
    covariance. In the paper, the ratio is not clipped.
    """

    kind: Literal["kl_cov"] = "kl_cov"
    share: Annotated[Share, Field(gt=0)] = 2e-3
    """Share of the tokens of a train step that have the penalty: one token at least."""
    coefficient: Rate = 1.0
    """Weight of the penalty."""


def prepare(rollouts: Rollouts, advantage_N: Tensor, section: KlCov) -> Tensor:
    """Return 1 for the tokens with the greatest covariances, otherwise 0 [N]."""
    return largest(covariance(rollouts.old_logp_N, advantage_N), section.share).to(advantage_N.dtype)


def kl_cov(tokens: Tokens, section: KlCov) -> PolicyLoss:
    """Return the loss of `clipped` per token, plus coefficient * abs(logp - old_logp) for the chosen tokens."""
    assert tokens.prepared_N is not None
    plain = clipped(tokens, section)
    distance_N = (tokens.logp_N - tokens.old_logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs()
    return plain._replace(loss_N=plain.loss_N + section.coefficient * tokens.prepared_N * distance_N)


PART = Part(
    kl_cov,
    KlCov,
    lambda section: ratio_needs(section.ratio),
    "Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning, section 4",
    prepare,
)
