"""GRPO's advantage: the return of the whole episode against those of its group."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Share

from ..parts import Advantages, Part, Rollouts
from ..returns import discounted_returns, standardised


class GroupNormalised(AdvantageSection):
    """The episode's return, normalised over its group."""

    kind: Literal["group_normalised"] = "group_normalised"
    gamma: Share = 1.0
    """Discount factor per turn."""


def group_normalised(rollouts: Rollouts, section: GroupNormalised) -> Advantages:
    """Return (G - mean) / (std + 1e-6), where G is the return of the whole episode.

    All tokens of an episode have the same advantage. Mean and (unbiased) standard deviation are those of G in the
    episode's group. In a group with one episode or with equal returns, all advantages are 0.
    """
    return_E = discounted_returns(rollouts.reward_ET, rollouts.turn_mask_ET, gamma=section.gamma)[:, 0]
    advantage_E = return_E.new_zeros(return_E.shape)
    rows_of: dict[str, list[int]] = {}
    for row, group in enumerate(rollouts.groups):
        rows_of.setdefault(group, []).append(row)
    for rows in rows_of.values():
        advantage_E[rows] = standardised(return_E[rows], correction=1)
    return Advantages(rollouts.spread(advantage_E.float()[:, None] * rollouts.turn_mask_ET))


PART = Part(group_normalised, GroupNormalised, frozenset({"groups"}), "Shao et al. 2024, DeepSeekMath, section 4.1")
