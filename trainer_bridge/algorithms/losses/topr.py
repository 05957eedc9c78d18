"""TOPR: tapered off-policy REINFORCE."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import LossSection

from ..parts import Part, PolicyLoss, Tokens
from ..terms import bounded_exp, total


class Topr(LossSection):
    """The policy gradient, with a weight for negative advantages that decreases as the policy learns to avoid them."""

    kind: Literal["topr"] = "topr"
    ratio: Literal["rollout", "geometric", "token"] = "rollout"
    """The ratio to the old policy: the product over the rollout as in the paper, its geometric mean, or each token's
    own."""


def topr(tokens: Tokens, section: Topr) -> PolicyLoss:
    """Return TOPR's loss per token.

        weight = min(ratio, 1) for A < 0, otherwise 1, without a gradient
        loss   = -weight * A * logp

    The ratio is exp() of the sum, or of the mean, of logp - old_logp over the tokens of the rollout.
    """
    difference_N = (tokens.logp_N - tokens.old_logp_N).detach()
    if section.ratio != "token":
        difference_N = total(difference_N, tokens.segments, "rollout", mean=section.ratio == "geometric")
    weight_N = bounded_exp(difference_N).clamp(max=1.0).where(tokens.advantage_N < 0, 1.0)
    return PolicyLoss(-weight_N * tokens.advantage_N * tokens.logp_N)


PART = Part(
    topr,
    Topr,
    lambda section: frozenset({"advantages"} | (set() if section.ratio == "token" else {"whole_rollouts"})),
    "Le Roux et al. 2025, Tapered Off-Policy REINFORCE, equation 8",
)
