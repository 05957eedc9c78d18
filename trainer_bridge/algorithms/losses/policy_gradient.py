"""Losses of the log-probability, weighted by the advantage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from envkit.config.algorithm import LossSection
from envkit.config.grammar import Rate, Share

from ..parts import Part, PolicyLoss, Tokens
from ..terms import MAX_LOG_RATIO, bounded_exp, log_ratio, total


class Reinforce(LossSection):
    """The policy gradient without a ratio."""

    kind: Literal["reinforce"] = "reinforce"


def reinforce(tokens: Tokens, section: Reinforce) -> PolicyLoss:
    """Return ``-logp * A`` per token."""
    return PolicyLoss(-tokens.logp_N * tokens.advantage_N)


REINFORCE = Part(reinforce, Reinforce, frozenset({"advantages", "on_policy"}), "Williams 1992")


class Imitation(LossSection):
    """Imitate the tokens, whatever their rewards."""

    kind: Literal["imitation"] = "imitation"


def imitation(tokens: Tokens, section: Imitation) -> PolicyLoss:
    """Return ``-logp`` per token."""
    return PolicyLoss(-tokens.logp_N)


IMITATION = Part(imitation, Imitation, source="maximum likelihood")


class Cispo(LossSection):
    """The policy gradient, weighted by the clipped ratio: tokens beyond the clip keep a gradient."""

    kind: Literal["cispo"] = "cispo"
    clip_low: Annotated[Share, Field(gt=0)] | None = None
    """The weight is at least 1 - clip_low. null: no minimum, as in the paper."""
    clip_high: Rate = 4.0
    """The weight is at most 1 + clip_high. In TRL, epsilon_high is this maximum itself: 5.0 there is 4.0 here."""


def cispo(tokens: Tokens, section: Cispo) -> PolicyLoss:
    """Return CISPO's loss per token, and whether each token's weight is clipped (`clip_share`).

    weight = clamp(exp(logp - old_logp), 1 - clip_low, 1 + clip_high), without a gradient
    loss   = -weight * A * logp
    """
    ratio_N = bounded_exp(tokens.logp_N - tokens.old_logp_N).detach()
    lowest = 0.0 if section.clip_low is None else 1 - section.clip_low
    weight_N = ratio_N.clamp(lowest, 1 + section.clip_high)
    return PolicyLoss(-weight_N * tokens.advantage_N * tokens.logp_N, {"clip_share": weight_N != ratio_N})


CISPO = Part(
    cispo,
    Cispo,
    frozenset({"advantages"}),
    "Chen et al. 2025, MiniMax-M1, equations 4 and 5; clip_high of Khatri et al. 2025, ScaleRL",
)


class Topr(LossSection):
    """The policy gradient, with a weight for negative advantages that decreases as the policy learns to avoid them."""

    kind: Literal["topr"] = "topr"
    ratio: Literal["rollout", "geometric", "token"] = "rollout"
    """The ratio to the old policy: the product over the rollout as in the paper, its geometric mean, or each token's
    own."""


def topr(tokens: Tokens, section: Topr) -> PolicyLoss:
    """Return TOPR's loss per token.

        weight = min(ratio, 1) for A < 0, otherwise 1, without a gradient
        loss   = -weight * A * logp

    The ratio is exp() of the sum, or of the mean, of logp - old_logp over the tokens of the rollout.
    """
    difference_N = (tokens.logp_N - tokens.old_logp_N).detach()
    if section.ratio != "token":
        difference_N = total(difference_N, tokens.segments, "rollout", mean=section.ratio == "geometric")
    weight_N = bounded_exp(difference_N).clamp(max=1.0).where(tokens.advantage_N < 0, 1.0)
    return PolicyLoss(-weight_N * tokens.advantage_N * tokens.logp_N)


TOPR = Part(
    topr,
    Topr,
    lambda section: frozenset({"advantages"} | (set() if section.ratio == "token" else {"whole_rollouts"})),
    "Le Roux et al. 2025, Tapered Off-Policy REINFORCE, equation 8",
)


class Kimi(LossSection):
    """The policy gradient, with a penalty for the distance from the old policy."""

    kind: Literal["kimi"] = "kimi"
    tau: Rate = 0.1
    """Weight of the squared log-ratio of each rollout."""


def kimi(tokens: Tokens, section: Kimi) -> PolicyLoss:
    """Return the loss of Kimi k1.5 per token.

        loss = -A * logp + tau / 2 * D^2 / n

    D is the sum of logp - old_logp over the n tokens of the rollout, each between -20 and 20 nats. The penalty of all
    its tokens together is thus tau / 2 * D^2.
    """
    difference_N = (tokens.logp_N - tokens.old_logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sum_N = total(difference_N, tokens.segments, "rollout")
    mean_N = total(difference_N, tokens.segments, "rollout", mean=True)
    return PolicyLoss(-tokens.advantage_N * tokens.logp_N + section.tau / 2 * sum_N * mean_N)


KIMI = Part(kimi, Kimi, frozenset({"whole_rollouts"}), "Kimi Team 2025, Kimi k1.5, equation 3")


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


CHUNK_CLIPPED = Part(
    chunk_clipped,
    ChunkClipped,
    lambda section: frozenset({"advantages"} | (set() if section.max_mismatch is None else {"recomputed"})),
    "Wang et al. 2025, Let It Flow (ROME), interaction-perceptive agentic policy optimization",
)
