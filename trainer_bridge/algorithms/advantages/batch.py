"""Advantages without a critic or a group: returns against the batch, and the grades of a teacher."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Rate, Share

from ..parts import Advantages, Part, Rollouts
from ..returns import discounted_returns, normalised, rows_by, standardised, standardised_by, steps_of
from ..terms import kl_estimate


class BatchNormalised(AdvantageSection):
    """The return from a turn on, normalised over all turns of the batch."""

    kind: Literal["batch_normalised"] = "batch_normalised"
    gamma: Share = 1.0
    """Discount factor per turn."""


def batch_normalised(rollouts: Rollouts, section: BatchNormalised) -> Advantages:
    """Return the discounted returns with mean 0 and standard deviation 1 over all turns of the batch.

    If all returns are equal, the advantages are 0.
    """
    return_ET = discounted_returns(rollouts.reward_ET, rollouts.turn_mask_ET, gamma=section.gamma)
    return Advantages(rollouts.spread(normalised(return_ET, rollouts.turn_mask_ET)))


BATCH_NORMALISED = Part(batch_normalised, BatchNormalised, source="Liu et al. 2025, GEM, return batch normalisation")


class ReinforcePlusPlus(AdvantageSection):
    """The return from a token on, normalised over all tokens of the batch."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Share = 1.0
    """Discount factor per token."""
    baseline: Literal["none", "group"] = "none"
    """group: the return of the whole episode, less the mean of its group, instead of that from the token on."""


def reinforce_plus_plus(rollouts: Rollouts, section: ReinforcePlusPlus) -> Advantages:
    """Return (G - mean) / (deviation + 1e-6) over all tokens, where G is the return from the token on.

    Tokens of tools are no steps. With the KL divergence in the rewards, G has the divergence of the token and of those
    after it. With the baseline, G is the return of the whole episode, less the mean of its group; tokens of groups of
    one have the advantage 0 and no part in the normalisation.
    """
    steps = steps_of(rollouts, "token")
    return_ES = discounted_returns(steps.total(rollouts.token_reward_N), steps.mask_ES, gamma=section.gamma)
    compared_E = steps.mask_ES[:, 0] > 0
    if section.baseline == "group":
        for rows in rows_by(rollouts.groups):
            return_ES[rows] = return_ES[rows, :1] - return_ES[rows, 0].mean()
            compared_E[rows] &= len(rows) > 1
    return_N, compared_N = steps.spread(return_ES), compared_E[steps.rollout_N]
    advantage_N = return_N.new_zeros(return_N.shape)
    advantage_N[compared_N] = standardised(return_N[compared_N])
    return Advantages(advantage_N.float())


REINFORCE_PLUS_PLUS = Part(
    reinforce_plus_plus,
    ReinforcePlusPlus,
    lambda section: frozenset({"groups"} if section.baseline == "group" else ()),
    "Hu et al. 2025, REINFORCE++",
)


class ChunkReturns(AdvantageSection):
    """The discounted return of a chunk: the tokens of the policy between two observations, which are a turn."""

    kind: Literal["chunk_returns"] = "chunk_returns"
    gamma: Share = 0.95
    """Discount factor per turn."""
    reward: Literal["outcome", "turns"] = "outcome"
    """outcome: the sum of the episode's rewards, at its last turn. turns: each turn's own reward."""
    normalise: Literal["none", "batch", "group"] = "none"
    """Subtract the mean and divide by the standard deviation, of the batch or of the group. An outcome is normalised
    over episodes before it is discounted; returns of turns are normalised over turns."""


def chunk_returns(rollouts: Rollouts, section: ChunkReturns) -> Advantages:
    """Return gamma^d * R for the outcome R, where d is the number of turns after this one; or, with `reward: turns`,
    the discounted return from each turn on.

    Turns without policy tokens do not count. IPA learns from the outcome. `reward: turns` is `agentic_reinforce` of
    ROLL, and with `normalise` its `step_reinforce`; `batch_normalised` is the same as `normalise: batch`.
    """
    steps, groups = steps_of(rollouts, "turn"), rollouts.groups if section.normalise == "group" else None
    mask_ES, reward_ES = steps.mask_ES, steps.total(rollouts.token_reward_N)
    if section.reward == "outcome":
        outcome_E = reward_ES.sum(1)
        if section.normalise != "none":
            outcome_E = standardised_by(outcome_E, groups or [""] * len(outcome_E))
        last_E = mask_ES.sum(1).long() - 1
        reward_ES = reward_ES.new_zeros(reward_ES.shape).scatter(1, last_E[:, None], outcome_E[:, None])
    return_ES = discounted_returns(reward_ES, mask_ES, gamma=section.gamma)
    if section.reward == "turns" and section.normalise != "none":
        is_step_ES = mask_ES > 0
        keys = [groups[row] if groups else "" for row in is_step_ES.nonzero()[:, 0].tolist()]
        return_ES[is_step_ES] = standardised_by(return_ES[is_step_ES], keys)
    return Advantages(steps.spread(return_ES).float())


CHUNK_RETURNS = Part(
    chunk_returns,
    ChunkReturns,
    lambda section: frozenset({"groups"} if section.normalise == "group" else ()),
    "Wang et al. 2025, Let It Flow: Agentic Crafting on Rock and Roll (IPA); ROLL",
)


class Distillation(AdvantageSection):
    """The reference policy, as the teacher, grades each token; rewards do not count."""

    kind: Literal["distillation"] = "distillation"
    coefficient: Rate = 1.0
    """Factor of the advantages."""


def distillation(rollouts: Rollouts, section: Distillation) -> Advantages:
    """Return coefficient * (reference_logp - old_logp), bounded to 20 nats before the factor.

    Its mean over tokens of the policy is the negative of KL(policy, reference) for the next token, the reverse KL
    divergence. The divergence of later tokens does not count.
    """
    assert rollouts.reference_logp_N is not None, "distillation needs log-probabilities of the reference policy"
    divergence_N = kl_estimate(rollouts.old_logp_N.double(), rollouts.reference_logp_N.double(), "k1")
    return Advantages((-section.coefficient * divergence_N).float())


DISTILLATION = Part(
    distillation,
    Distillation,
    frozenset({"reference"}),
    "Agarwal et al. 2024, On-Policy Distillation of Language Models; Lu et al. 2025, On-Policy Distillation",
)
