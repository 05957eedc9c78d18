"""Truncated importance sampling (TIS)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from envkit.config.algorithm import CorrectionSection

from ..parts import Part, Segments
from ..terms import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


class Tis(CorrectionSection):
    """The ratio of the trainer's to the sampler's probability of each token, up to a cap."""

    kind: Literal["tis"] = "tis"
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Maximum of the factor."""


def tis(old_N: Tensor, sampled_N: Tensor, segments: Segments, section: Tis) -> Tensor:
    """Return min(exp(old - sampled), cap) for each token."""
    return (old_N - sampled_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=section.cap)


PART = Part(
    tis,
    Tis,
    frozenset({"recomputed"}),
    "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL",
)
