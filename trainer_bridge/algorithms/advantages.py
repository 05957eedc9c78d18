"""Advantage functions: how much better each turn was than expected. Axes: B samples, T turns (padded).

A step of the decision process is a turn, not a token. All tokens of a turn have the same advantage, and the discount
applies per turn. Every function returns zeros where `turn_mask_BT` is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .catalogue import Algorithm

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class AdvantageBatch:
    """The inputs of an advantage function.

    Attributes:
        reward_BT: Reward of each turn.
        turn_mask_BT: 1 for turns of the sample, 0 for padding.
        value_BT: The critic's estimate at the start of each turn; zeros without a critic.
        groups: Key of each sample's group [B].
    """

    reward_BT: Tensor
    turn_mask_BT: Tensor
    value_BT: Tensor
    groups: Sequence[str]


def discounted_returns(reward_BT: Tensor, turn_mask_BT: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted return from each turn onwards, G[t] = r[t] + gamma * G[t+1]."""
    reward_BT = reward_BT * turn_mask_BT
    return_BT = torch.zeros_like(reward_BT)
    following_B = torch.zeros_like(reward_BT[:, 0])
    for turn in reversed(range(reward_BT.shape[1])):
        following_B = reward_BT[:, turn] + gamma * following_B
        return_BT[:, turn] = following_B
    return return_BT * turn_mask_BT


def group_normalised(reward_BT: Tensor, turn_mask_BT: Tensor, groups: Sequence[str], *, gamma: float = 1.0) -> Tensor:
    """Return GRPO's advantages (Shao et al. 2024): (G - mean) / (std + 1e-6), where G is the sample's whole return.

    All turns of a sample have the same advantage. Mean and (unbiased) standard deviation are those of G in the sample's
    group. In a group with one sample or with equal returns, all advantages are 0. See `AdvantageBatch` for the inputs.
    """
    return_B = discounted_returns(reward_BT, turn_mask_BT, gamma=gamma)[:, 0]
    advantage_B = torch.zeros_like(return_B)
    rows_of: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    for rows in rows_of.values():
        return_G = return_B[rows]
        if len(rows) > 1 and bool(return_G.std() > EPSILON):
            advantage_B[rows] = (return_G - return_G.mean()) / (return_G.std() + EPSILON)
    return advantage_B[:, None] * turn_mask_BT


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

    A lambda of 0 relies on the critic alone, and 1 on the observed returns. See `AdvantageBatch` for the other inputs.

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
    count = turn_mask_BT.sum().clamp(min=1)
    mean = (value_BT * turn_mask_BT).sum() / count
    centred_BT = (value_BT - mean) * turn_mask_BT
    deviation = (centred_BT.square().sum() / count).sqrt()
    if not bool(deviation > EPSILON):
        return torch.zeros_like(value_BT)
    return centred_BT / (deviation + EPSILON)


def _of_groups(batch: AdvantageBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    advantage_BT = group_normalised(batch.reward_BT, batch.turn_mask_BT, batch.groups, gamma=algorithm.gamma)
    return advantage_BT, torch.zeros_like(advantage_BT)


def _of_batch(batch: AdvantageBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    advantage_BT = batch_normalised(batch.reward_BT, batch.turn_mask_BT, gamma=algorithm.gamma)
    return advantage_BT, torch.zeros_like(advantage_BT)


def _of_critic(batch: AdvantageBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    advantage_BT, return_BT = gae(
        batch.reward_BT, batch.value_BT, batch.turn_mask_BT, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda
    )
    return normalised(advantage_BT, batch.turn_mask_BT), return_BT


BY_NAME: Mapping[str, Callable[[AdvantageBatch, Algorithm], tuple[Tensor, Tensor]]] = {
    "group_normalised": _of_groups,
    "batch_normalised": _of_batch,
    "gae": _of_critic,
}
"""The functions for the names in `catalogue.ADVANTAGES`. Each returns the advantages [B, T], and the critic's targets
[B, T], which are zeros without a critic.
"""
