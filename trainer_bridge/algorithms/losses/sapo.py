"""SAPO: a soft gate in place of a clip."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import LossSection
from envkit.config.grammar import Rate

from ..parts import Part, PolicyLoss, Tokens
from ..terms import bounded_exp


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


PART = Part(
    sapo, Sapo, frozenset({"advantages"}), "Gao et al. 2025, Soft Adaptive Policy Optimization, equations 5 to 7"
)
