"""A constant: the sum over the tokens of a rollout, divided by the same number for all."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AggregationSection
from envkit.config.grammar import Count

from ..parts import Part, Segments, Tensor


class Constant(AggregationSection):
    """The sum over the tokens of each episode, divided by a constant, then the mean over episodes."""

    kind: Literal["constant"] = "constant"
    tokens: Count = 1
    """The constant, such as the maximum number of tokens of an episode. 1: the plain sum."""


def constant(segments: Segments, section: Constant) -> Tensor:
    """Return 1 / (rollouts * constant) for each token, in float64. Unlike those of means, the sum is not 1."""
    rollouts = int((segments.rollout_N.bincount() > 0).sum())
    return segments.rollout_N.new_ones(len(segments.rollout_N)).double() / (max(rollouts, 1) * section.tokens)


PART = Part(constant, Constant, source="Liu et al. 2025, Understanding R1-Zero-Like Training (Dr. GRPO), section 3.2")
