"""Parts of algorithms, as another package might provide them."""

from __future__ import annotations

from dataclasses import replace

import torch

from envkit.config.algorithm import AdvantageSection, LossSection
from envkit.trainer_bridge.algorithms.algorithm import Algorithm, Chosen
from envkit.trainer_bridge.algorithms.parts import Advantages, Part, PolicyLoss, Rollouts, Tokens
from tests.trainer_bridge.trainees import algorithm_of


def _last_turn(rollouts: Rollouts, section: AdvantageSection) -> Advantages:
    """The reward of the last turn, on its tokens; all others are worth nothing."""
    last_E = rollouts.turn_mask_ET.sum(1).long() - 1
    is_last_ET = torch.zeros_like(rollouts.turn_mask_ET).scatter(1, last_E[:, None], 1.0)
    return Advantages(rollouts.spread((rollouts.reward_ET + 0.1) * is_last_ET))


def _two_critics(rollouts: Rollouts, section: AdvantageSection) -> Advantages:
    """Rewards less the mean of two critics: one expects the reward of the turn, and the other one twice that."""
    reward_ET = rollouts.reward_ET * rollouts.turn_mask_ET
    advantage_ET = (reward_ET - rollouts.value_KET.mean(0)) * rollouts.turn_mask_ET
    return Advantages(rollouts.spread(advantage_ET), torch.stack([reward_ET, 2 * reward_ET]))


def _rollout_ratio(tokens: Tokens, section: LossSection) -> PolicyLoss:
    """The ratio of a whole rollout: the geometric mean of those of its tokens (GSPO, without its clip)."""
    rollout_N = torch.unique(tokens.segments.rollout_N, return_inverse=True)[1]
    size_E = rollout_N.bincount()
    difference_N = tokens.logp_N - tokens.old_logp_N
    total_E = difference_N.new_zeros(len(size_E)).index_add(0, rollout_N, difference_N)
    return PolicyLoss(-(total_E / size_E).exp()[rollout_N] * tokens.advantage_N)


LAST_TURN = Chosen(Part(_last_turn, AdvantageSection), AdvantageSection(kind="last_turn"))
ROLLOUT_RATIO = Chosen(
    Part(_rollout_ratio, LossSection, frozenset({"whole_rollouts", "advantages"})), LossSection(kind="rollout_ratio")
)
TWO_CRITICS: Algorithm = replace(
    algorithm_of(minibatches=1),
    advantage=Chosen(Part(_two_critics, AdvantageSection, frozenset({"critics:2"})), AdvantageSection(kind="two")),
)
