"""CISPO: the policy gradient, weighted by a clipped ratio."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import LossSection
from envkit.config.grammar import PositiveShare, Rate

from ..parts import Part, PolicyLoss, Tokens
from ..terms import bounded_exp


class Cispo(LossSection):
    """The policy gradient, weighted by the clipped ratio: tokens beyond the clip keep a gradient."""

    kind: Literal["cispo"] = "cispo"
    clip_low: PositiveShare | None = None
    """The weight is at least 1 - clip_low. null: no minimum, as in the paper."""
    clip_high: Rate = 4.0
    """The weight is at most 1 + clip_high. In TRL, epsilon_high is this maximum itself: 5.0 there is 4.0 here."""


def cispo(tokens: Tokens, section: Cispo) -> PolicyLoss:
    """Return CISPO's loss per token, and whether each token's weight is clipped (`clip_share`).

    weight = clamp(exp(logp - old_logp), 1 - clip_low, 1 + clip_high), without a gradient
    loss   = -weight * A * logp
    """
    ratio_N = bounded_exp(tokens.logp_N - tokens.old_logp_N).detach()
    lowest = 0.0 if section.clip_low is None else 1 - section.clip_low
    weight_N = ratio_N.clamp(lowest, 1 + section.clip_high)
    return PolicyLoss(-weight_N * tokens.advantage_N * tokens.logp_N, {"clip_share": weight_N != ratio_N})


PART = Part(
    cispo,
    Cispo,
    frozenset({"advantages"}),
    "Chen et al. 2025, MiniMax-M1, equations 4 and 5; clip_high of Khatri et al. 2025, ScaleRL",
)
