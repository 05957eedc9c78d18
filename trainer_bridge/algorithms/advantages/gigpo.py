"""GiGPO: an episode against its group, and a turn against the group's turns in the same state."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Share

from ..parts import Advantages, Part, Rollouts
from ..returns import discounted_returns, standardised_by


class Gigpo(AdvantageSection):
    """The episode's return among those of its group, plus each turn's return among those from the same state."""

    kind: Literal["gigpo"] = "gigpo"
    gamma: Share = 0.95
    """Discount factor per turn of the returns from a turn on."""
    step_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the comparison of turns."""
    deviation: Literal["group", "none"] = "group"
    """Divisor of both: the standard deviation of the returns that are compared. none: 1."""


def gigpo(rollouts: Rollouts, section: Gigpo) -> Advantages:
    """Return normalised(sum of the rewards) + step_weight * normalised(discounted return from the turn on).

    The sums of the rewards are compared in the group, each episode once. The returns are compared among the turns of
    the group that answer the same observation; a turn whose observation is unknown, or that is alone, has 0. The same
    observation means the same text, whatever the history before it and the tools.
    """
    divides, mask_ET = section.deviation == "group", rollouts.turn_mask_ET
    total_E = discounted_returns(rollouts.reward_ET, mask_ET, gamma=1.0)[:, 0]
    return_ET = discounted_returns(rollouts.reward_ET, mask_ET, gamma=section.gamma)
    known_ET = (mask_ET > 0) & (rollouts.observation_ET != 0)
    rows, observations = known_ET.nonzero()[:, 0].tolist(), rollouts.observation_ET[known_ET].tolist()
    states = [(rollouts.groups[row], observation) for row, observation in zip(rows, observations, strict=True)]
    step_ET = return_ET.new_zeros(return_ET.shape)
    step_ET[known_ET] = standardised_by(return_ET[known_ET], states, divides=divides)
    episode_E = standardised_by(total_E, rollouts.groups, divides=divides)
    return Advantages(rollouts.spread(episode_E[:, None] + section.step_weight * step_ET).float())


PART = Part(
    gigpo, Gigpo, frozenset({"groups"}), "Feng et al. 2025, Group-in-Group Policy Optimization for LLM Agent Training"
)
