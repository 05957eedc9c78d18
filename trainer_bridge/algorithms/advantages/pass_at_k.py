"""Pass@k: an episode's share in the best reward of k episodes."""

from __future__ import annotations

from math import comb
from typing import Literal

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Count

from ..parts import Advantages, Part, Rollouts, Tensor
from ..returns import EPSILON, deviation, discounted_returns, rows_by


class PassAtK(AdvantageSection):
    """The mean best return of k episodes of the group, if this one is among them, less that of any k, divided by the
    standard deviation.
    """

    kind: Literal["pass_at_k"] = "pass_at_k"
    k: Count = 2
    """Number of episodes of which the best counts; 1 is `group_normalised`. It must be less than `rollout.group_size`,
    because all advantages of a group with k or fewer episodes are 0."""


def pass_at_k(rollouts: Rollouts, section: PassAtK) -> Advantages:
    """Return (mean of M(S) over the S with the episode - mean of M(S)) / (deviation of M(S) + 1e-6).

    S is a subset of k episodes of the group, and M(S) the largest return in it (the sum of the rewards). For rewards of
    0 and 1, this is the analytical advantage of Chen et al., but for the deviation: theirs is that of a population, and
    here it is that of a sample, as in the other advantages.
    """
    return_E = discounted_returns(rollouts.reward_ET, rollouts.turn_mask_ET, gamma=1.0)[:, 0]
    advantage_E = return_E.new_zeros(return_E.shape)
    for rows in rows_by(rollouts.groups):
        # The smallest M(S) is the return of rank k. All are equal if it is the largest one.
        if deviation(return_E[rows].sort().values[section.k - 1 :]):
            advantage_E[rows] = _advantages(return_E[rows], section.k)
    return Advantages(rollouts.spread(advantage_E[:, None] * rollouts.turn_mask_ET).float())


def _advantages(return_N: Tensor, k: int) -> Tensor:
    """Return the advantages in a group of N > k episodes: of the subsets, only the number is computed."""
    size, (sorted_N, order_N) = len(return_N), return_N.sort()
    subsets, others = comb(size, k), comb(size - 1, k - 1)
    # The share of the subsets whose largest element is that of rank n: the others are k - 1 of the n below it.
    share_N = return_N.new_tensor([comb(rank, k - 1) / subsets for rank in range(size)])
    mean = (share_N * sorted_N).sum()
    variance = (share_N * (sorted_N - mean).square()).sum() * subsets / (subsets - 1)
    # Of the subsets with an episode, those that it leads, and those that one of a higher rank leads.
    leads_N = return_N.new_tensor([comb(rank, k - 1) / others for rank in range(size)]) * sorted_N
    follows_N = return_N.new_tensor([comb(rank - 1, k - 2) / others if rank and k > 1 else 0.0 for rank in range(size)])
    above_N = (follows_N * sorted_N).flip(0).cumsum(0).flip(0) - follows_N * sorted_N
    found_N = (leads_N + above_N - mean) / (variance.sqrt() + EPSILON)
    return found_N.new_zeros(size).index_put((order_N,), found_N)


PART = Part(
    pass_at_k,
    PassAtK,
    frozenset({"groups"}),
    "Chen et al. 2025, Pass@k Training for Adaptively Balancing Exploration and Exploitation, section 2.4",
)
