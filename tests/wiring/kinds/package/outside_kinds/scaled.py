"""A loss with a key of its own: one file, and one line of `pyproject.toml`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from envkit.config.algorithm import LossSection
from envkit.trainer_bridge.algorithms.parts import Part, PolicyLoss, Tokens


class ScaledSection(LossSection):
    kind: Literal["scaled"] = "scaled"
    strength: float = Field(default=1.0, gt=0)


def scaled(tokens: Tokens, section: ScaledSection) -> PolicyLoss:
    """REINFORCE's loss times the key `strength`, with the factor as a metric."""
    plain_N = -tokens.logp_N * tokens.advantage_N
    return PolicyLoss(section.strength * plain_N, {"strength": plain_N.detach() * 0 + section.strength})


PART = Part(scaled, ScaledSection, needs=frozenset({"on_policy", "advantages"}))
