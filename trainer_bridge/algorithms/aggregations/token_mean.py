"""The mean over all tokens of an update."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AggregationSection

from ..parts import Part, Segments, Tensor


class TokenMean(AggregationSection):
    """The mean over tokens: a long episode counts more than a short one."""

    kind: Literal["token_mean"] = "token_mean"


def token_mean(segments: Segments, section: TokenMean) -> Tensor:
    """Return 1 / N for each of N tokens, in float64."""
    size = len(segments.rollout_N)
    return segments.rollout_N.new_ones(size).double() / max(size, 1)


PART = Part(token_mean, TokenMean, source="Yu et al. 2025, DAPO, section 3.3")
