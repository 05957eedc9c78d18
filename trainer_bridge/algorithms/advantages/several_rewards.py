"""GDPO: several rewards, each normalised within the group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from envkit.config.algorithm import AdvantageSection
from envkit.errors import UsageError

from ..parts import Advantages, Part, Rollouts
from ..returns import standardised, standardised_by


class SeveralRewards(AdvantageSection):
    """The weighted sum of the named rewards, each normalised over the group."""

    kind: Literal["several_rewards"] = "several_rewards"
    weights: Mapping[str, float] = Field(default_factory=dict)
    """Weight of each reward by its name in `info["rewards"]` of the environment's steps; 1 for those left out."""
    whiten: bool = True
    """Whether the sums are normalised over all episodes of the batch."""


def several_rewards(rollouts: Rollouts, section: SeveralRewards) -> Advantages:
    """Return the sum over names of weight * (G - mean) / (deviation + 1e-6), normalised over the episodes of the batch.

    G is the sum of the episode's rewards of this name; mean and deviation are those of the group.

    Only the named rewards count: neither the reward itself, nor `algorithm.overlong`, nor `algorithm.kl` in the reward.

    Raises:
        UsageError: No episode has named rewards, or none has one that a weight names.
    """
    names = ", ".join(rollouts.rewards)
    if not rollouts.rewards:
        raise UsageError(
            'algorithm.advantage: several_rewards needs named rewards, but no episode has any; return info["rewards"] '
            "from the steps of the environment, or use group_normalised"
        )
    if unknown := [name for name in section.weights if name not in rollouts.rewards]:
        raise UsageError(
            f"algorithm.advantage.weights: no episode of this train step names a reward {unknown[0]!r}, only: {names}; "
            "return every named reward from each step, 0 if it is not earned"
        )
    sum_E = rollouts.reward_ET.new_zeros(len(rollouts.groups)).double()
    for name, reward_ET in rollouts.rewards.items():
        weight = section.weights.get(name, 1.0)
        sum_E += weight * standardised_by(reward_ET.double().sum(1), rollouts.groups)
    advantage_E = standardised(sum_E) if section.whiten else sum_E
    return Advantages(rollouts.spread(advantage_E[:, None] * rollouts.turn_mask_ET).float())


PART = Part(
    several_rewards,
    SeveralRewards,
    frozenset({"groups"}),
    "Liu et al. 2026, GDPO: Group reward-Decoupled Normalization Policy Optimization; TRL, normalize_then_sum",
)
