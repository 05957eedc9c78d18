"""PPO's clipped surrogate loss, with a bound for negative advantages (dual clip)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from envkit.config.algorithm import LossSection
from envkit.config.grammar import PositiveShare, Rate

from ..parts import Part, PolicyLoss, Tokens
from ..terms import MAX_LOG_RATIO, RatioUnit, bounded_exp, log_ratio, ratio_needs


class ClipKeys(LossSection):
    """The keys of `clipped`, which losses that extend it have, too."""

    ratio: RatioUnit = "token"
    """The ratio to the old policy: of each token, or the geometric mean over its turn or its whole rollout (GSPO)."""
    clip_low: PositiveShare = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Rate = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Maximum of the ratio for negative advantages, so that a token which the sampler found unlikely cannot dominate an
    update. null: no maximum, but log-ratios are at most 20 nats."""


class Clipped(ClipKeys):
    """The clipped ratio of PPO."""

    kind: Literal["clipped"] = "clipped"


def clipped(tokens: Tokens, section: ClipKeys) -> PolicyLoss:
    """Return PPO's clipped surrogate loss per token, and whether each token's ratio is clipped (`clip_share`).

        ratio = exp(clamp(logp - old_logp, -20, 20))
        loss  = -min(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A)

    For A < 0, this loss grows with the ratio. `dual_clip` bounds it (Ye et al. 2020): loss <= dual_clip * abs(A).
    """
    difference_N, advantage_N = log_ratio(tokens, section.ratio), tokens.advantage_N
    whole_N = bounded_exp(difference_N)
    ratio_N = whole_N.clamp(max=section.dual_clip).where(advantage_N < 0, whole_N) if section.dual_clip else whole_N
    free_N = ratio_N * advantage_N
    held_N = ratio_N.clamp(1 - section.clip_low, 1 + section.clip_high) * advantage_N
    clipped_N = (held_N < free_N) | (ratio_N < whole_N) | (difference_N.abs() > MAX_LOG_RATIO)
    return PolicyLoss(-free_N.minimum(held_N), {"clip_share": clipped_N.detach()})


PART = Part(
    clipped,
    Clipped,
    lambda section: ratio_needs(section.ratio) | {"advantages"},
    "Schulman et al. 2017, equation 7; Ye et al. 2020, equation 5; Zheng et al. 2025, GSPO-token",
)
