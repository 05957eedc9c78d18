"""The return of the whole episode against those of its group: GRPO, Dr. GRPO, RLOO and Lite PPO."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Share

from ..parts import Advantages, Part, Rollouts
from ..returns import EPSILON, deviation, discounted_returns, rows_by


class GroupNormalised(AdvantageSection):
    """The episode's return, less a baseline of its group, divided by a deviation."""

    kind: Literal["group_normalised"] = "group_normalised"
    gamma: Share = 1.0
    """Discount factor per turn."""
    baseline: Literal["mean", "others"] = "mean"
    """mean: the mean return of the group. others: that of its other episodes (leave one out)."""
    deviation: Literal["group", "batch", "none"] = "group"
    """Divisor: the standard deviation of the returns of the group, or of the batch. none: 1."""


def group_normalised(rollouts: Rollouts, section: GroupNormalised) -> Advantages:
    """Return (G - baseline) / (deviation + 1e-6), where G is the return of the whole episode.

    All tokens of an episode have the same advantage. In a group with one episode or with equal returns, all advantages
    are 0.
    """
    return_E = discounted_returns(rollouts.reward_ET, rollouts.turn_mask_ET, gamma=section.gamma)[:, 0]
    advantage_E = return_E.new_zeros(return_E.shape)
    for rows in rows_by(rollouts.groups):
        found = deviation(return_E[rows])
        if found:
            divisor = {"group": found, "batch": deviation(return_E), "none": 1.0 - EPSILON}[section.deviation]
            factor = len(rows) / (len(rows) - 1) if section.baseline == "others" else 1.0
            advantage_E[rows] = factor * (return_E[rows] - return_E[rows].mean()) / (divisor + EPSILON)
    return Advantages(rollouts.spread(advantage_E.float()[:, None] * rollouts.turn_mask_ET))


PART = Part(
    group_normalised,
    GroupNormalised,
    frozenset({"groups"}),
    "Shao et al. 2024, DeepSeekMath, section 4.1; Liu et al. 2025, Dr. GRPO; Ahmadian et al. 2024, RLOO; Liu et al. "
    "2025, Tricks or Traps (Lite PPO)",
)
