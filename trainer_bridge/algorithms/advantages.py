"""Advantages: how much better than expected each turn was. Axes: B samples, T turns (padded).

Turns, not tokens, are the steps of the decision process: all tokens of a turn share its advantage, and discounting
never counts observation tokens. Every function returns zeros where `turn_mask_BT` is 0.
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
    """What an advantage may be made of.

    Attributes:
        reward_BT: Reward of each turn.
        turn_mask_BT: 1 where the turn exists.
        value_BT: The critic's estimate when the turn began; zeros without a critic.
        groups: Key of each sample's group [B].
    """

    reward_BT: Tensor
    turn_mask_BT: Tensor
    value_BT: Tensor
    groups: Sequence[str]


def discounted_returns(reward_BT: Tensor, turn_mask_BT: Tensor, *, gamma: float) -> Tensor:
    """Return G[t] = r[t] + gamma * G[t+1] within each sample."""
    reward_BT = reward_BT * turn_mask_BT
    return_BT = torch.zeros_like(reward_BT)
    following_B = torch.zeros_like(reward_BT[:, 0])
    for turn in reversed(range(reward_BT.shape[1])):
        following_B = reward_BT[:, turn] + gamma * following_B
        return_BT[:, turn] = following_B
    return return_BT * turn_mask_BT


def group_normalised(reward_BT: Tensor, turn_mask_BT: Tensor, groups: Sequence[str], *, gamma: float = 1.0) -> Tensor:
    """GRPO (Shao et al. 2024): (G - mean) / (std + 1e-6) of the whole return, over the samples of the same group.

    The standard deviation is the unbiased one; a group of one, or whose returns are all equal, teaches nothing and
    gets zeros.

    Args:
        reward_BT: Reward of each turn.
        turn_mask_BT: 1 where the turn exists.
        groups: Key of each sample's group [B].
        gamma: Discount a turn.
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
    """Return batch normalisation (GEM, Liu et al. 2025): returns of all turns of the batch, mean 0 and deviation 1.

    The deviation is the population's; a batch whose returns are all equal gets zeros.
    """
    return normalised(discounted_returns(reward_BT, turn_mask_BT, gamma=gamma), turn_mask_BT)


def gae(
    reward_BT: Tensor, value_BT: Tensor, turn_mask_BT: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (Schulman et al. 2016) over turns; the value after the last turn is 0.

        delta[t] = r[t] + gamma * V[t+1] - V[t]
        A[t]     = delta[t] + gamma * lambda * A[t+1]

    Args:
        reward_BT: Reward of each turn.
        value_BT: The critic's estimate when the turn began; no gradient.
        turn_mask_BT: 1 where the turn exists.
        gamma: Discount a turn.
        gae_lambda: 0 trusts the critic, 1 the returns.

    Returns:
        Advantages, not normalised, and the returns A + V that the critic is to learn.
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
    """Shift and scale to mean 0 and (population) deviation 1 over the turns that exist."""
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
"""The names of `catalogue.ADVANTAGES`. Each gives advantages [B, T] as the loss takes them, and what the critic is to
learn [B, T], which is zeros without one."""
