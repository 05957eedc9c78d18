"""Slow implementations of advantages and losses in plain Python, from the formulas of the papers.

A batch is a list of episodes, an episode a list of rewards: nothing is padded, so nothing needs a mask. Sums run
forward over all that is left of an episode, where the code that is tested goes backward by recursion.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations

EPSILON = 1e-6
"""What is added to a deviation before it divides."""


def are_equal(values: Sequence[float]) -> bool:
    """Whether values differ only by rounding errors of float32."""
    return max(values) - min(values) <= 1e-6 * max(1.0, abs(statistics.fmean(values)))


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Sutton and Barto, eq. 3.8: the sum of gamma**k * r[t + k] over everything that follows."""
    last = len(rewards)
    return [math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, last)) for t in range(last)]


def group_normalised(episodes: Sequence[Sequence[float]], groups: Sequence[str], gamma: float) -> list[list[float]]:
    """DeepSeekMath, sec. 4.1.2: an episode's return, less its group's mean, over its group's deviation."""
    total = [returns(episode, gamma)[0] for episode in episodes]
    advantages = []
    for episode, own, group in zip(episodes, total, groups, strict=True):
        siblings = [value for value, other in zip(total, groups, strict=True) if other == group]
        deviation = statistics.stdev(siblings) if len(siblings) > 1 else 0.0
        known = not are_equal(siblings)
        advantage = (own - statistics.fmean(siblings)) / (deviation + EPSILON) if known else 0.0
        advantages.append([advantage] * len(episode))
    return advantages


def normalised(episodes: Sequence[Sequence[float]]) -> list[list[float]]:
    """Every value of every episode, less the mean of all, over the deviation of all."""
    every = [value for episode in episodes for value in episode]
    if are_equal(every):
        return [[0.0] * len(episode) for episode in episodes]
    mean, deviation = statistics.fmean(every), statistics.stdev(every)
    return [[(value - mean) / (deviation + EPSILON) for value in episode] for episode in episodes]


def pass_at_k(total: Sequence[float], k: int) -> list[float]:
    """Chen et al. 2025: the best of every k of a group's returns; the mean over those with one, against that of all."""
    chosen = [*combinations(range(len(total)), k)]
    best = [max(total[row] for row in rows) for rows in chosen]
    if len(best) < 2 or are_equal(best):
        return [0.0] * len(total)
    mean, deviation = statistics.fmean(best), statistics.stdev(best)
    with_it = [[one for one, rows in zip(best, chosen, strict=True) if row in rows] for row in range(len(total))]
    return [(statistics.fmean(own) - mean) / (deviation + EPSILON) for own in with_it]


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float, after: float = 0.0
) -> list[float]:
    """Schulman et al. 2016, eq. 16: the exponentially weighted mean of the k-step estimates of eq. 11 to 14.

    The weight of the estimates that would reach beyond the end belongs to the one that reaches the end, after which the
    value is `after`.
    """
    last = len(rewards)

    def estimate(t: int, k: int) -> float:
        seen = math.fsum(gamma**step * rewards[t + step] for step in range(k))
        beyond = gamma**k * (values[t + k] if t + k < last else after)
        return seen + beyond - values[t]

    advantages = []
    for t in range(last):
        left = last - t
        early = math.fsum(gae_lambda ** (k - 1) * estimate(t, k) for k in range(1, left))
        advantages.append((1 - gae_lambda) * early + gae_lambda ** (left - 1) * estimate(t, left))
    return advantages


def tis(old_logp: float, sampled_logp: float, cap: float) -> float:
    """Yao et al. 2025: the trainer's probability over the sampler's, cut at the cap."""
    return min(math.exp(old_logp) / math.exp(sampled_logp), cap)


def entropy(probabilities: Sequence[float]) -> float:
    """Shannon 1948, theorem 2, in nats."""
    return -math.fsum(p * math.log(p) for p in probabilities if p > 0)


def kl(policy: Sequence[float], reference: Sequence[float]) -> float:
    """Kullback and Leibler 1951, in nats."""
    return math.fsum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
