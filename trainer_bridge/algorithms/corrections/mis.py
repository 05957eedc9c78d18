"""Masked importance sampling (MIS)."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import CorrectionSection
from envkit.config.grammar import Rate

from ..parts import Part, Segments, Tensor
from ..terms import Mean, RatioUnit, sampler_ratio


class Mis(CorrectionSection):
    """The ratio of the trainer's to the sampler's probability; 0 if it is above a cap."""

    kind: Literal["mis"] = "mis"
    cap: Rate = 2.0
    """Greatest ratio that is not masked."""
    low: Rate | None = None
    """Least ratio that is not masked. null: none."""
    unit: RatioUnit = "token"
    """The ratio: of each token, or over its turn or its whole rollout."""
    mean: Mean = "product"
    """Over a turn or rollout: the product of the tokens' ratios, or their geometric mean."""


def mis(old_N: Tensor, sampled_N: Tensor, segments: Segments, section: Mis) -> Tensor:
    """Return the ratio of each token if low <= ratio <= cap, otherwise 0; see `sampler_ratio`."""
    ratio_N = sampler_ratio(old_N, sampled_N, segments, section.unit, section.mean)
    return ratio_N * ((ratio_N <= section.cap) & (ratio_N >= (section.low or 0.0)))


PART = Part(
    mis,
    Mis,
    frozenset({"recomputed"}),
    "Liu et al. 2025, When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
)
