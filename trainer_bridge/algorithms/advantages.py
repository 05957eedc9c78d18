"""Advantage functions: how much better each turn was than expected. Axes: B samples, T turns (padded).

A step of the decision process is a turn, not a token. All tokens of a turn have the same advantage, and the discount
applies per turn. Every function returns zeros where `turn_mask_BT` is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from envkit.types import Sample

from .catalogue import Algorithm

EPSILON = 1e-6
"""What is added to a deviation before it divides, and the largest relative difference between equal values."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The inputs of an advantage function: B episodes, whose S samples have N policy tokens in all.

    Attributes:
        reward_BT: Reward of each turn.
        turn_mask_BT: 1 for turns of the episode, 0 for padding.
        value_KBT: The estimate of each of K critics at the start of each turn; K is 0 without a critic.
        groups: Key of each episode's group [B].
        samples: The samples [S], in the order of the tokens.
        rows: Index of each sample's episode [S].
    """

    reward_BT: Tensor
    turn_mask_BT: Tensor
    value_KBT: Tensor
    groups: Sequence[str]
    samples: Sequence[Sample]
    rows: Sequence[int]

    def spread(self, advantage_BT: Tensor) -> Tensor:
        """Return an advantage for each policy token [N]: that of the token's turn."""
        turns = [torch.from_numpy(sample.turn_ids[sample.mask]).long() for sample in self.samples]
        return torch.cat([advantage_BT[row, turn] for row, turn in zip(self.rows, turns, strict=True)])


class Advantages(NamedTuple):
    """The result of an advantage function: a number for each policy token [N], and the critic's targets [B, T].

    The targets are None without a critic.
    """

    advantage_N: Tensor
    target_BT: Tensor | None = None


def discounted_returns(reward_BT: Tensor, turn_mask_BT: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted return from each turn onwards, G[t] = r[t] + gamma * G[t+1], in float64."""
    reward_BT = (reward_BT * turn_mask_BT).double()
    return_BT = torch.zeros_like(reward_BT)
    following_B = torch.zeros_like(reward_BT[:, 0])
    for turn in reversed(range(reward_BT.shape[1])):
        following_B = reward_BT[:, turn] + gamma * following_B
        return_BT[:, turn] = following_B
    return return_BT * turn_mask_BT


def group_normalised(reward_BT: Tensor, turn_mask_BT: Tensor, groups: Sequence[str], *, gamma: float = 1.0) -> Tensor:
    """Return GRPO's advantages (Shao et al. 2024): (G - mean) / (std + 1e-6), where G is the sample's whole return.

    All turns of a sample have the same advantage. Mean and (unbiased) standard deviation are those of G in the sample's
    group. In a group with one sample or with equal returns, all advantages are 0. See `Rollouts` for the inputs.
    """
    return_B = discounted_returns(reward_BT, turn_mask_BT, gamma=gamma)[:, 0]
    advantage_B = torch.zeros_like(return_B)
    rows_of: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    for rows in rows_of.values():
        advantage_B[rows] = _standardised(return_B[rows], correction=1)
    return advantage_B.float()[:, None] * turn_mask_BT


def batch_normalised(reward_BT: Tensor, turn_mask_BT: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted returns, normalised over all turns of the batch (ReBN of GEM, Liu et al. 2025).

    Their mean becomes 0 and their population standard deviation 1. If all returns are equal, the result is 0.
    """
    return normalised(discounted_returns(reward_BT, turn_mask_BT, gamma=gamma), turn_mask_BT)


def gae(
    reward_BT: Tensor, value_BT: Tensor, turn_mask_BT: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates over turns (Schulman et al. 2016). The value after the last turn is 0.

        delta[t] = r[t] + gamma * V[t+1] - V[t]
        A[t]     = delta[t] + gamma * lambda * A[t+1]

    A lambda of 0 relies on the critic alone, and 1 on the observed returns. See `Rollouts` for the other inputs.

    Returns:
        The advantages, not normalised, and the targets for the critic, A + V.
    """
    reward_BT, value_BT = reward_BT * turn_mask_BT, value_BT * turn_mask_BT
    advantage_BT = torch.zeros_like(reward_BT)
    next_advantage_B = torch.zeros_like(reward_BT[:, 0])
    next_value_B = torch.zeros_like(next_advantage_B)
    for turn in reversed(range(reward_BT.shape[1])):
        delta_B = reward_BT[:, turn] + gamma * next_value_B - value_BT[:, turn]
        next_advantage_B = (delta_B + gamma * gae_lambda * next_advantage_B) * turn_mask_BT[:, turn]
        next_value_B = value_BT[:, turn]
        advantage_BT[:, turn] = next_advantage_B
    return advantage_BT, (advantage_BT + value_BT) * turn_mask_BT


def normalised(value_BT: Tensor, turn_mask_BT: Tensor) -> Tensor:
    """Normalise all values except the padding to mean 0 and population standard deviation 1; equal values become 0."""
    is_turn_BT = turn_mask_BT > 0
    normalised_BT = torch.zeros_like(value_BT, dtype=torch.float32)
    normalised_BT[is_turn_BT] = _standardised(value_BT[is_turn_BT].double(), correction=0).float()
    return normalised_BT


def _standardised(value_N: Tensor, *, correction: int) -> Tensor:
    """Return (value - mean) / (std + 1e-6), or zeros if the values are equal but for rounding errors.

    Args:
        value_N: The values, in float64.
        correction: 1 for the unbiased standard deviation, 0 for that of the population.
    """
    if not len(value_N) or not bool(value_N.max() - value_N.min() > EPSILON * value_N.mean().abs().clamp(min=1.0)):
        return torch.zeros_like(value_N)
    return (value_N - value_N.mean()) / (value_N.std(correction=correction) + EPSILON)


def of_groups(rollouts: Rollouts, algorithm: Algorithm) -> Advantages:
    """The advantage ``group_normalised``; see `group_normalised`."""
    advantage_BT = group_normalised(rollouts.reward_BT, rollouts.turn_mask_BT, rollouts.groups, gamma=algorithm.gamma)
    return Advantages(rollouts.spread(_clipped(advantage_BT, algorithm)))


def of_batch(rollouts: Rollouts, algorithm: Algorithm) -> Advantages:
    """The advantage ``batch_normalised``; see `batch_normalised`."""
    advantage_BT = batch_normalised(rollouts.reward_BT, rollouts.turn_mask_BT, gamma=algorithm.gamma)
    return Advantages(rollouts.spread(_clipped(advantage_BT, algorithm)))


def of_critic(rollouts: Rollouts, algorithm: Algorithm) -> Advantages:
    """The advantage ``gae`` of the first critic, normalised over all turns; see `gae`."""
    advantage_BT, target_BT = gae(
        rollouts.reward_BT,
        rollouts.value_KBT[0],
        rollouts.turn_mask_BT,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
    )
    advantage_BT = _clipped(normalised(advantage_BT, rollouts.turn_mask_BT), algorithm)
    return Advantages(rollouts.spread(advantage_BT), target_BT)


def _clipped(advantage_BT: Tensor, algorithm: Algorithm) -> Tensor:
    bound = algorithm.advantage_clip
    return advantage_BT if bound is None else advantage_BT.clamp(-bound, bound)
