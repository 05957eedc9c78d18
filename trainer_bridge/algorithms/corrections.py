"""Corrections: factors that make up for a sampler whose probabilities differ from the trainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from envkit.config.algorithm import CorrectionSection
from envkit.config.grammar import Rate

from .parts import Part, Segments
from .terms import Mean, RatioUnit, sampler_ratio

if TYPE_CHECKING:
    from torch import Tensor


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


TIS = Part(
    tis,
    Tis,
    frozenset({"recomputed"}),
    "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL",
)


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


MIS = Part(
    mis,
    Mis,
    frozenset({"recomputed"}),
    "Liu et al. 2025, When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
)


class Icepop(CorrectionSection):
    """The ratio of the trainer's to the sampler's probability of each token; 0 outside of two bounds."""

    kind: Literal["icepop"] = "icepop"
    low: Rate = 0.5
    """Least ratio that is not masked."""
    high: Rate = 5.0
    """Greatest ratio that is not masked."""


def icepop(old_N: Tensor, sampled_N: Tensor, segments: Segments, section: Icepop) -> Tensor:
    """Return the ratio of each token if low <= ratio <= high, otherwise 0.

    Masked tokens still count in the denominators of means.
    """
    ratio_N = sampler_ratio(old_N, sampled_N, segments)
    return ratio_N * ((ratio_N >= section.low) & (ratio_N <= section.high))


ICEPOP = Part(icepop, Icepop, frozenset({"recomputed"}), "Ling Team 2025, Every Step Evolves (Ring-1T), IcePop")


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


SEQUENCE_MASK = Part(
    sequence_mask,
    SequenceMask,
    frozenset({"recomputed"}),
    "Liu et al. 2025, When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
)
