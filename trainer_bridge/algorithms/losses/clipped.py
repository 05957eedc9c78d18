"""PPO's clipped surrogate loss, with a bound for negative advantages (dual clip)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from envkit.config.algorithm import LossSection

from ..parts import Part, PolicyLoss, Tokens
from ..terms import MAX_LOG_RATIO


class Clipped(LossSection):
    """The clipped ratio of PPO."""

    kind: Literal["clipped"] = "clipped"
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Half-width of the clipping range around ratio 1."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """Maximum of the ratio for negative advantages, so that a token which the sampler found unlikely cannot dominate an
    update. 1e9 is no maximum, since log-ratios are at most 20 nats."""


def clipped(tokens: Tokens, section: Clipped) -> PolicyLoss:
    """Return PPO's clipped surrogate loss per token, and whether each token's ratio is clipped (`clip_share`).

        ratio = exp(clamp(logp - old_logp, -20, 20))
        loss  = -min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A)

    For A < 0, this loss grows with the ratio. `dual_clip` bounds it (Ye et al. 2020): loss <= dual_clip * abs(A).
    """
    difference_N, advantage_N = tokens.logp_N - tokens.old_logp_N, tokens.advantage_N
    whole_N = difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio_N = whole_N.clamp(max=section.dual_clip).where(advantage_N < 0, whole_N)
    free_N = ratio_N * advantage_N
    held_N = ratio_N.clamp(1 - section.clip, 1 + section.clip) * advantage_N
    clipped_N = (held_N < free_N) | (ratio_N < whole_N) | (difference_N.abs() > MAX_LOG_RATIO)
    return PolicyLoss(-free_N.minimum(held_N), {"clip_share": clipped_N.detach()})


PART = Part(clipped, Clipped, frozenset({"advantages"}), "Schulman et al. 2017, equation 7; Ye et al. 2020, equation 5")
