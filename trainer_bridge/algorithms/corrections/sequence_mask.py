"""A mask of whole rollouts that sampler and trainer do not agree on."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import CorrectionSection
from envkit.config.grammar import Rate

from ..parts import Part, Segments, Tensor
from ..terms import Mean, sampler_ratio


class SequenceMask(CorrectionSection):
    """Nothing is learned from a rollout whose ratio of the trainer's to the sampler's probability is out of bounds."""

    kind: Literal["sequence_mask"] = "sequence_mask"
    mean: Mean = "geometric"
    """The ratio of a rollout: the geometric mean of its tokens' ratios, or their product."""
    low: Rate = 0.99
    """Least ratio of a rollout that is not masked. 0.5 is usual with product."""
    high: Rate = 1.01
    """Greatest ratio of a rollout that is not masked. 2.0 is usual with product."""


def sequence_mask(old_N: Tensor, sampled_N: Tensor, segments: Segments, section: SequenceMask) -> Tensor:
    """Return 1 for each token if low <= ratio of its rollout <= high, otherwise 0; see `sampler_ratio`."""
    ratio_N = sampler_ratio(old_N, sampled_N, segments, "rollout", section.mean)
    return ((ratio_N >= section.low) & (ratio_N <= section.high)).to(ratio_N.dtype)


PART = Part(
    sequence_mask,
    SequenceMask,
    frozenset({"recomputed"}),
    "Liu et al. 2025, When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
)
