"""Returns of chunks: the outcome of an episode, discounted by the number of turns until then."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Share

from ..parts import Advantages, Part, Rollouts
from ..returns import discounted_returns, standardised_by, steps_of


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


PART = Part(
    chunk_returns,
    ChunkReturns,
    lambda section: frozenset({"groups"} if section.normalise == "group" else ()),
    "Wang et al. 2025, Let It Flow: Agentic Crafting on Rock and Roll (IPA); ROLL",
)
