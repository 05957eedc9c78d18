"""Means and 95 % intervals over episodes, where several episodes may belong to the same task.

Most functions take a sequence of tasks; each task is a sequence with one value per episode. All tasks have the same
weight, even if their numbers of episodes differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_Z95 = 1.959964
_AMOUNTS = ("return", "turns")
CUT = "answers_cut_off"
"""Metric: share of an episode's answers that reached their token limit."""
VALID = "action_is_valid"
"""Metric of most environments: share of an episode's actions in a valid format."""
SHARES = (CUT, VALID, "action_is_effective", "format_is_valid", "tool_call_ok", "flips")
"""Metrics that are shares in [0, 1], as are success, pass@k and pass^k."""


class Estimate(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


class Stratum(NamedTuple):
    """Success on the tasks whose shortest solution has from `shortest` to `longest` moves.

    Attributes:
        successes: Number of episodes that succeeded.
        success: Success rate, averaged over the tasks, and its interval.
    """

    shortest: int
    longest: int
    episodes: int
    successes: int
    success: Estimate


def is_share(name: str) -> bool:
    """Whether a metric lies in [0, 1]."""
    return name in SHARES or name.startswith(("success", "pass@", "pass^"))


def summarise(tasks: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Estimate]:
    """Return the mean and interval of each metric. Episodes that do not report a metric do not count for it."""
    names = dict.fromkeys(["success", *_AMOUNTS])
    names.update(dict.fromkeys(name for task in tasks for metrics in task for name in metrics))
    found = {}
    for name in names:
        values = [some for task in tasks if (some := [metrics[name] for metrics in task if name in metrics])]
        if values:
            found[name] = estimate(values, is_share=is_share(name) or (name not in _AMOUNTS and _are_binary(values)))
    return found


def estimate(tasks: Sequence[Sequence[float]], *, is_share: bool) -> Estimate:
    """Return the mean of the tasks' means, and its 95 % interval.

    Episodes of one task are correlated, so an interval that treats them as independent would be too narrow.

    If `is_share` is true and all values are 0 or 1, this is Wilson's interval, which is accurate near 0 and 1. Its
    sample size is the number of independent episodes that would give the observed variance of the task means (Kish's
    design effect), but at least the number of tasks and at most that of episodes. If all values are equal, the variance
    is unknown, and the sample size is the number of tasks.

    Otherwise it is the normal interval over the task means, which is clipped to [0, 1] for a share. Its width is zero
    if all task means are equal.
    """
    count = len(tasks)
    means = [math.fsum(values) / len(values) for values in tasks]
    mean = math.fsum(means) / count
    variance = math.fsum((one - mean) ** 2 for one in means) / max(1, count - 1) / count
    if is_share and _are_binary(tasks):
        episodes = sum(map(len, tasks))
        spread = mean * (1 - mean)
        effective = count if spread == 0 else episodes if spread > variance * episodes else spread / variance
        return _wilson(mean, max(count, effective))
    half = _Z95 * math.sqrt(variance)
    low, high = mean - half, mean + half
    return Estimate(mean, max(0.0, low), min(1.0, high)) if is_share else Estimate(mean, low, high)


def _are_binary(tasks: Sequence[Sequence[float]]) -> bool:
    return all(value in (0, 1) for values in tasks for value in values)


def _wilson(mean: float, count: float) -> Estimate:
    square = _Z95 * _Z95 / count
    middle = (mean + square / 2) / (1 + square)
    half = _Z95 * math.sqrt(mean * (1 - mean) / count + square / (4 * count)) / (1 + square)
    return Estimate(mean, max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)))


def strata(tasks: Iterable[tuple[int, Sequence[bool]]], *, most: int | None = None) -> list[Stratum]:
    """Return the success rate by the length of the shortest solution, from short to long.

    Args:
        tasks: For each task, the number of moves of its shortest solution and whether each of its episodes succeeded.
        most: Maximum number of strata. If there are more solution lengths, neighbouring lengths are merged, so that
            each stratum has about the same number of tasks. None makes one stratum per length.
    """
    by_length: dict[int, list[Sequence[bool]]] = {}
    for length, solved in tasks:
        by_length.setdefault(length, []).append(solved)
    bins = len(by_length) if most is None else min(most, len(by_length))
    total = sum(map(len, by_length.values()))
    merged: dict[int, list[int]] = {}
    before = 0
    for index, length in enumerate(sorted(by_length)):
        middle = before + len(by_length[length]) / 2
        before += len(by_length[length])
        merged.setdefault(index if bins == len(by_length) else int(bins * middle / total), []).append(length)
    return [_stratum([(length, one) for length in some for one in by_length[length]]) for some in merged.values()]


def _stratum(tasks: Sequence[tuple[int, Sequence[bool]]]) -> Stratum:
    lengths = [length for length, _ in tasks]
    return Stratum(
        shortest=min(lengths),
        longest=max(lengths),
        episodes=sum(len(solved) for _, solved in tasks),
        successes=sum(map(sum, (solved for _, solved in tasks))),
        success=estimate([solved for _, solved in tasks], is_share=True),
    )
