"""The loss of imitation: cross-entropy of the tokens."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import LossSection

from ..parts import Part, PolicyLoss, Tokens


class Imitation(LossSection):
    """Imitate the tokens, whatever their rewards."""

    kind: Literal["imitation"] = "imitation"


def imitation(tokens: Tokens, section: Imitation) -> PolicyLoss:
    """Return ``-logp`` per token."""
    return PolicyLoss(-tokens.logp_N)


PART = Part(imitation, Imitation, source="maximum likelihood")
