"""Truncated importance sampling (TIS)."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import CorrectionSection
from envkit.config.grammar import Rate

from ..parts import Part, Segments, Tensor
from ..terms import Mean, RatioUnit, sampler_ratio


class Tis(CorrectionSection):
    """The ratio of the trainer's to the sampler's probability, up to a cap."""

    kind: Literal["tis"] = "tis"
    cap: Rate = 2.0
    """Maximum of the factor."""
    unit: RatioUnit = "token"
    """The ratio: of each token, or over its turn or its whole rollout."""
    mean: Mean = "product"
    """Over a turn or rollout: the product of the tokens' ratios, or their geometric mean."""


def tis(old_N: Tensor, sampled_N: Tensor, segments: Segments, section: Tis) -> Tensor:
    """Return min(ratio, cap) for each token; see `sampler_ratio`."""
    return sampler_ratio(old_N, sampled_N, segments, section.unit, section.mean).clamp(max=section.cap)


PART = Part(
    tis,
    Tis,
    frozenset({"recomputed"}),
    "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL",
)
