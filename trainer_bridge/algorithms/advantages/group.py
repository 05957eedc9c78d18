"""Advantages of an episode against its group."""

from __future__ import annotations

from collections.abc import Mapping
from math import comb
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from envkit.config.algorithm import AdvantageSection
from envkit.config.grammar import Count, Share
from envkit.errors import UsageError

from ..parts import Advantages, Part, Rollouts
from ..returns import EPSILON, deviation, discounted_returns, rows_by, standardised, standardised_by

if TYPE_CHECKING:
    from torch import Tensor


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


GROUP_NORMALISED = Part(
    group_normalised,
    GroupNormalised,
    frozenset({"groups"}),
    "Shao et al. 2024, DeepSeekMath, section 4.1; Liu et al. 2025, Dr. GRPO; Ahmadian et al. 2024, RLOO; Liu et al. "
    "2025, Tricks or Traps (Lite PPO)",
)


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


GIGPO = Part(
    gigpo, Gigpo, frozenset({"groups"}), "Feng et al. 2025, Group-in-Group Policy Optimization for LLM Agent Training"
)


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
            advantage_E[rows] = _shares_in_best(return_E[rows], section.k)
    return Advantages(rollouts.spread(advantage_E[:, None] * rollouts.turn_mask_ET).float())


def _shares_in_best(return_N: Tensor, k: int) -> Tensor:
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


PASS_AT_K = Part(
    pass_at_k,
    PassAtK,
    frozenset({"groups"}),
    "Chen et al. 2025, Pass@k Training for Adaptively Balancing Exploration and Exploitation, section 2.4",
)


class SeveralRewards(AdvantageSection):
    """The weighted sum of the named rewards, each normalised over the group."""

    kind: Literal["several_rewards"] = "several_rewards"
    weights: Mapping[str, float] = Field(default_factory=dict)
    """Weight of each reward by its name in `info["rewards"]` of the environment's steps; 1 for those left out."""
    whiten: bool = True
    """Whether the sums are normalised over all episodes of the batch."""


def several_rewards(rollouts: Rollouts, section: SeveralRewards) -> Advantages:
    """Return the sum over names of weight * (G - mean) / (deviation + 1e-6), normalised over the episodes of the batch.

    G is the sum of the episode's rewards of this name; mean and deviation are those of the group.

    Only the named rewards count: neither the reward itself, nor `algorithm.overlong`, nor `algorithm.kl` in the reward.

    Raises:
        UsageError: No episode has named rewards, or none has one that a weight names.
    """
    names = ", ".join(rollouts.rewards)
    if not rollouts.rewards:
        raise UsageError(
            'algorithm.advantage: several_rewards needs named rewards, but no episode has any; return info["rewards"] '
            "from the steps of the environment, or use group_normalised"
        )
    if unknown := [name for name in section.weights if name not in rollouts.rewards]:
        raise UsageError(
            f"algorithm.advantage.weights: no episode of this train step names a reward {unknown[0]!r}, only: {names}; "
            "return every named reward from each step, 0 if it is not earned"
        )
    sum_E = rollouts.reward_ET.new_zeros(len(rollouts.groups)).double()
    for name, reward_ET in rollouts.rewards.items():
        weight = section.weights.get(name, 1.0)
        sum_E += weight * standardised_by(reward_ET.double().sum(1), rollouts.groups)
    advantage_E = standardised(sum_E) if section.whiten else sum_E
    return Advantages(rollouts.spread(advantage_E[:, None] * rollouts.turn_mask_ET).float())


SEVERAL_REWARDS = Part(
    several_rewards,
    SeveralRewards,
    frozenset({"groups"}),
    "Liu et al. 2026, GDPO: Group reward-Decoupled Normalization Policy Optimization; TRL, normalize_then_sum",
)
