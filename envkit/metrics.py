"""Episode metrics: values that an environment reports at each step are aggregated into one number per episode.

An environment declares its metrics in ``metadata["metrics"]``, a mapping from name to aggregation. It reports their
values in ``info`` under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

Fold = Literal["mean", "last", "sum"]


def fold(values: Sequence[float], how: Fold) -> float:
    """Aggregate the values of one episode, in step order; NaN if there are no values."""
    if not values:
        return math.nan
    if how == "last":
        return float(values[-1])
    total = math.fsum(values)
    return total if how == "sum" else total / len(values)


def fold_infos(infos: Sequence[Mapping[str, object]], folds: Mapping[str, Fold]) -> dict[str, float]:
    """Aggregate each metric of `folds` over the infos of one episode's steps.

    Returns:
        One number for each metric that at least one step reported.
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
        k: At least 1, and at most the number of results.
        results: Whether each attempt succeeded.
    """
    if not 1 <= k <= len(results):
        raise ValueError(f"k must lie between 1 and the number of results, {len(results)}, got {k}")
    failures = len(results) - sum(map(bool, results))
    return 1 - math.comb(failures, k) / math.comb(len(results), k)


def pass_at_group(groups: Sequence[Sequence[bool]]) -> float:
    """Return the share of groups with at least one success (RAGEN's pass@group_size); NaN if there are no groups."""
    return sum(any(group) for group in groups) / len(groups) if groups else math.nan
