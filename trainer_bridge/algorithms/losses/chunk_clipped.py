"""The loss of IPA, with a ratio per chunk: the policy's tokens between two observations, which are a turn."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import LossSection
from envkit.config.grammar import Rate

from ..parts import Part, PolicyLoss, Tokens
from ..terms import bounded_exp, log_ratio, total


class ChunkClipped(LossSection):
    """The policy gradient, with the ratio of the turn as a weight for negative advantages, and without turns to which
    sampler and trainer give very different probabilities.
    """

    kind: Literal["chunk_clipped"] = "chunk_clipped"
    max_mismatch: Rate | None = 2.0
    """Maximum of the geometric mean, over the turn's tokens, of the ratio of the trainer's to the sampler's
    probability; other turns are masked. null: no maximum."""


def chunk_clipped(tokens: Tokens, section: ChunkClipped) -> PolicyLoss:
    """Return IPA's loss per token, and whether its turn is masked (`clip_share`).

        weight = min(ratio, 1) for A < 0, otherwise 1, without a gradient
        mask   = 1 if mismatch <= max_mismatch, otherwise 0
        loss   = -mask * weight * A * logp

    Ratio and mismatch are exp() of the mean of logp - old_logp, and of old_logp - sampled_logp, over the turn.
    """
    advantage_N = tokens.advantage_N
    weight_N = bounded_exp(log_ratio(tokens, "turn").detach()).clamp(max=1.0).where(advantage_N < 0, 1.0)
    mismatch_N = bounded_exp(total(tokens.old_logp_N - tokens.sampled_logp_N, tokens.segments, "turn", mean=True))
    is_masked_N = mismatch_N > (float("inf") if section.max_mismatch is None else section.max_mismatch)
    return PolicyLoss(-weight_N * advantage_N * tokens.logp_N * ~is_masked_N, {"clip_share": is_masked_N})


PART = Part(
    chunk_clipped,
    ChunkClipped,
    lambda section: frozenset({"advantages"} | (set() if section.max_mismatch is None else {"recomputed"})),
    "Wang et al. 2025, Let It Flow (ROME), interaction-perceptive agentic policy optimization",
)
