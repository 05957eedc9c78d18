"""Episode metrics: the values that an environment reports at its steps become one number per episode.

An environment declares its metrics in ``metadata["metrics"]``, a mapping from the name of each metric to ``"mean"``,
``"last"`` or ``"sum"``. Its steps report the values in ``info`` under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

Fold = Literal["mean", "last", "sum"]


def fold(values: Sequence[float], how: Fold) -> float:
    """Return the mean, last or sum of the values that a metric had at an episode's steps; NaN without values."""
    if not values:
        return math.nan
    if how == "last":
        return float(values[-1])
    total = math.fsum(values)
    return total if how == "sum" else total / len(values)


def fold_infos(infos: Sequence[Mapping[str, object]], folds: Mapping[str, Fold]) -> dict[str, float]:
    """Return one number for each metric of `folds` that at least one step of an episode reported.

    `infos` are the infos of the episode's steps, in order. `folds` maps the name of each metric to its aggregation.
    """
    folded = {}
    for name, how in folds.items():
        values = [float(value) for info in infos if isinstance(value := info.get(name), (bool, int, float))]
        if values:
            folded[name] = fold(values, how)
    return folded


def pass_at(k: int, results: Sequence[bool]) -> float:
    """Return the unbiased estimate of the probability that at least one of `k` attempts at a task succeeds.

        1 - C(n - c, k) / C(n, k)   for c successes in n attempts

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374.

    Args:
        k: Number of attempts; at least 1, and at most the length of `results`.
        results: Whether each attempt that was made succeeded.
    """
    if not 1 <= k <= len(results):
        raise ValueError(f"k must lie between 1 and the number of results, {len(results)}, got {k}")
    failures = len(results) - sum(map(bool, results))
    return 1 - math.comb(failures, k) / math.comb(len(results), k)


def pass_all(k: int, results: Sequence[bool]) -> float:
    """Return the unbiased estimate of the probability that all of `k` attempts at a task succeed, called pass^k.

        C(c, k) / C(n, k)   for c successes in n attempts

    Source: Yao et al., "tau-bench", arXiv 2406.12045. The arguments are those of `pass_at`.
    """
    if not 1 <= k <= len(results):
        raise ValueError(f"k must lie between 1 and the number of results, {len(results)}, got {k}")
    return math.comb(sum(map(bool, results)), k) / math.comb(len(results), k)


def pass_at_group(groups: Sequence[Sequence[bool]]) -> float:
    """Return the share of groups with at least one success; NaN without groups. RAGEN calls it pass@group_size."""
    return sum(any(group) for group in groups) / len(groups) if groups else math.nan
