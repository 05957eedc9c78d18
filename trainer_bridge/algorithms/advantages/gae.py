"""Generalised advantage estimates over turns."""

from __future__ import annotations

from typing import Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Share
from envkit.types import StopReason

from ..parts import Advantages, Part, Rollouts
from ..returns import normalised

_CUTS = frozenset({StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.CONTEXT_OVERFLOW, StopReason.PLAYER_TIMEOUT})


class Gae(AdvantageSection):
    """Generalised advantage estimates over turns, normalised over the batch; with a critic."""

    kind: Literal["gae"] = "gae"
    gamma: Share = 1.0
    """Discount factor per turn."""
    gae_lambda: Share = 0.95
    """0 relies on the critic alone, 1 on the observed returns."""
    bootstrap: bool = False
    """Whether the state after an episode that a limit cut off has the value of its last turn; otherwise, its value is
    0, as after an episode that the environment ended."""


def gae(rollouts: Rollouts, section: Gae) -> Advantages:
    """Return generalised advantage estimates over turns, normalised over all turns; the targets are A + V.

        delta[t] = r[t] + gamma * V[t+1] - V[t]
        A[t]     = delta[t] + gamma * lambda * A[t+1]

    The value after the last turn is 0; see `Gae.bootstrap`.
    """
    mask_ET = rollouts.turn_mask_ET
    reward_ET, value_ET = rollouts.reward_ET * mask_ET, rollouts.value_KET[0] * mask_ET
    following_E = reward_ET.new_zeros(len(reward_ET))  # the value after the last turn
    if section.bootstrap:
        is_cut_E = reward_ET.new_tensor([stop in _CUTS for stop in rollouts.stops])
        last_E = (mask_ET.sum(1).long() - 1).clamp(min=0)
        following_E = is_cut_E * value_ET.gather(1, last_E[:, None]).squeeze(1)
    advantage_ET = reward_ET.new_zeros(reward_ET.shape)
    advantage_E = following_E.new_zeros(following_E.shape)
    for turn in reversed(range(reward_ET.shape[1])):
        exists_E = mask_ET[:, turn]
        delta_E = reward_ET[:, turn] + section.gamma * following_E - value_ET[:, turn]
        advantage_E = (delta_E + section.gamma * section.gae_lambda * advantage_E) * exists_E
        following_E = value_ET[:, turn] + (1 - exists_E) * following_E
        advantage_ET[:, turn] = advantage_E
    target_ET = (advantage_ET + value_ET) * mask_ET
    return Advantages(rollouts.spread(normalised(advantage_ET, mask_ET)), target_ET[None])


PART = Part(gae, Gae, frozenset({"critics:1"}), "Schulman et al. 2016, High-Dimensional Continuous Control")
