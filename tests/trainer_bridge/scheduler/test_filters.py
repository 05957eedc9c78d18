"""Filters: which groups are trained on."""

from __future__ import annotations

import random

from envkit.trainer_bridge.scheduler.filters import SuccessBand, TopVariance, ZeroVariance
from envkit.types import Group, Outcome, StopReason, Task, Trajectory

TASK = Task("A-v0", 0)


def group(*returns: float | None, successes: int | None = None) -> Group:
    """A group of episodes with these returns, of which the first ones succeeded; None is a void episode."""
    outcomes = [
        Outcome.void(StopReason.SANDBOX_LOST, "lost")
        if one is None
        else Outcome.score(
            StopReason.TERMINATED, one, {} if successes is None else {"success": float(number < successes)}
        )
        for number, one in enumerate(returns)
    ]
    return Group(TASK, tuple(Trajectory(TASK, number, (), one) for number, one in enumerate(outcomes)))


def test_groups_without_variance_are_those_whose_returns_differ_by_rounding_at_most() -> None:
    keeps = ZeroVariance().keeps
    assert not keeps(group(10.9, 10.9 + 1e-6, 10.9))
    assert not keeps(group(0.3, None, 0.3))  # a void episode has no return
    assert not keeps(group(None))
    assert keeps(group(0.0, 1e-3))
    assert keeps(group(1000.0, 1000.0, 1000.5))


def test_the_band_has_its_bounds_and_does_not_judge_groups_of_unknown_success() -> None:
    keeps = SuccessBand(0.25, 0.75).keeps
    assert [keeps(group(0.0, 0.0, 0.0, 0.0, successes=count)) for count in range(5)] == [False, True, True, True, False]
    assert keeps(group(0.0, 0.0))


def test_the_groups_with_the_largest_variance_are_kept_and_none_without() -> None:
    top, rng = TopVariance(0.3), random.Random(0)
    spreads = [rng.random() for _ in range(300)]
    kept = [spread for spread in spreads if top.keeps(group(0.0, spread))][20:]
    assert 0.2 < len(kept) / 280 < 0.4
    assert min(kept) > 0.5
    alike = TopVariance(0.3)  # ties: none is among the top 30 %
    assert not any([alike.keeps(group(0.0, 1.0)) for _ in range(300)][20:])
