"""ReBN: the discounted return from each turn on, against those of the whole batch."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Share

from ..parts import Advantages, Part, Rollouts
from ..returns import discounted_returns, normalised


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


PART = Part(batch_normalised, BatchNormalised, source="Liu et al. 2025, GEM, return batch normalisation")
