"""REINFORCE's loss."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import LossSection

from ..parts import Part, PolicyLoss, Tokens


class Reinforce(LossSection):
    """The policy gradient without a ratio."""

    kind: Literal["reinforce"] = "reinforce"


def reinforce(tokens: Tokens, section: Reinforce) -> PolicyLoss:
    """Return ``-logp * A`` per token."""
    return PolicyLoss(-tokens.logp_N * tokens.advantage_N)


PART = Part(reinforce, Reinforce, frozenset({"advantages", "on_policy"}), "Williams 1992")
