"""The mean over groups of the mean over their tokens."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AggregationSection

from ..parts import Part, Segments, Tensor


class PromptMean(AggregationSection):
    """The mean over the tokens of each group, then over groups: all tasks count the same."""

    kind: Literal["prompt_mean"] = "prompt_mean"


def prompt_mean(segments: Segments, section: PromptMean) -> Tensor:
    """Return 1 / (groups * tokens of the token's group) for each token, in float64."""
    size_G = segments.group_N.bincount()
    return 1.0 / (size_G[segments.group_N].double() * max(int((size_G > 0).sum()), 1))


PART = Part(prompt_mean, PromptMean, source="Khatri et al. 2025, The Art of Scaling RL Compute (ScaleRL)")
