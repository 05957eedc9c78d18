"""IcePop: the ratio of each token within bounds."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import CorrectionSection
from envkit.config.grammar import Rate

from ..parts import Part, Segments, Tensor
from ..terms import sampler_ratio


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


PART = Part(icepop, Icepop, frozenset({"recomputed"}), "Ling Team 2025, Every Step Evolves (Ring-1T), IcePop")
