"""The clipped loss of the tokens of high entropy, where the policy decides how to go on."""

from __future__ import annotations

from typing import Literal

from envkit.config.grammar import PositiveShare

from ..parts import Part, PolicyLoss, Rollouts, Tensor, Tokens
from ..terms import largest, ratio_needs
from .clipped import ClipKeys, clipped


class TopEntropy(ClipKeys):
    """The clipped ratio of PPO, only of the tokens of a train step with the highest entropies."""

    kind: Literal["top_entropy"] = "top_entropy"
    share: PositiveShare = 0.2
    """Share of the tokens that the policy learns from. The others still count in the denominators of means."""


def prepare(rollouts: Rollouts, advantage_N: Tensor, section: TopEntropy) -> Tensor:
    """Return 1 for the tokens with the highest entropies of the old policy, otherwise 0 [N]."""
    assert rollouts.entropy_N is not None
    return largest(rollouts.entropy_N, section.share).to(advantage_N.dtype)


def top_entropy(tokens: Tokens, section: TopEntropy) -> PolicyLoss:
    """Return the loss of `clipped` for the chosen tokens, otherwise 0, and where either is held back (`clip_share`)."""
    assert tokens.prepared_N is not None
    plain = clipped(tokens, section)
    is_chosen_N = tokens.prepared_N > 0
    return PolicyLoss(plain.loss_N * is_chosen_N, {"clip_share": plain.metrics["clip_share"] | ~is_chosen_N})


PART = Part(
    top_entropy,
    TopEntropy,
    lambda section: ratio_needs(section.ratio) | {"advantages", "recomputed"},
    "Wang et al. 2025, Beyond the 80/20 Rule, equation 5",
    prepare,
)
