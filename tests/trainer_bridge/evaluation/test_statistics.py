"""Means and intervals of many episodes, worked by hand, also where several episodes had the same task."""

from __future__ import annotations

import pytest

from envkit.trainer_bridge.evaluation.statistics import SHARES, Estimate, estimate, strata, summarise


def once(*values: float) -> list[list[float]]:
    """One episode a task."""
    return [[value] for value in values]


def wilson(successes: float, count: float) -> Estimate:
    """Wilson's interval in another form: the two p with (p - mean)^2 = z^2 p (1 - p) / count."""
    mean, ratio = successes / count, 1.959964**2 / count
    root = (ratio * (ratio + 4 * mean * (1 - mean))) ** 0.5
    return Estimate(mean, (2 * mean + ratio - root) / (2 + 2 * ratio), (2 * mean + ratio + root) / (2 + 2 * ratio))


def test_wilsons_interval_of_eight_out_of_ten() -> None:
    assert estimate(once(*[1.0] * 8, *[0.0] * 2), is_share=True) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)


def test_the_interval_of_other_values_is_the_normal_one() -> None:
    # The standard deviation of 1, 2, 3, 4 is 1.29099, so the half width is 1.959964 * 1.29099 / 2.
    assert estimate(once(1.0, 2.0, 3.0, 4.0), is_share=False) == pytest.approx((2.5, 1.23485, 3.76515), abs=1e-5)
    assert estimate(once(1.0), is_share=False) == (1.0, 1.0, 1.0)


def test_attempts_that_always_end_alike_count_as_one_episode_per_task() -> None:
    alike = [[1.0] * 5] * 8 + [[0.0] * 5] * 2
    assert estimate(alike, is_share=True) == pytest.approx(estimate(once(*[1.0] * 8, *[0.0] * 2), is_share=True))
    # The same of an amount: only the ten means of the tasks count.
    assert estimate(alike, is_share=False) == estimate(once(*[1.0] * 8, *[0.0] * 2), is_share=False)


def test_attempts_with_no_correlation_within_tasks_count_as_one_episode_each() -> None:
    assert estimate([[1.0, 0.0]] * 10, is_share=True) == pytest.approx(wilson(10, 20))


def test_partly_correlated_attempts_count_as_the_effective_number_of_episodes() -> None:
    # Means 1, 0.5, 0.5, 0: their mean varies by (0.25 + 0.25) / 3 / 4 = 1/24, as that of 0.25 * 24 = 6 of 8 episodes.
    assert estimate([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], is_share=True) == pytest.approx(wilson(3, 6))


def test_a_metric_is_summed_up_over_the_episodes_that_have_it() -> None:
    found = summarise([[{"return": 2.0, "turns": 1.0, "depth": 7.0}], [{"return": 4.0, "turns": 2.0}], []])
    assert {name: one.mean for name, one in found.items()} == {"return": 3.0, "turns": 1.5, "depth": 7.0}
    assert list(found) == ["return", "turns", "depth"]


@pytest.mark.parametrize("name", SHARES)
def test_the_interval_of_a_share_is_within_0_and_1(name: str) -> None:
    low, high = (summarise([[{name: one, "return": one}] for one in values]) for values in ((0, 0.1, 0), (1, 0.9, 1)))
    assert low[name].low == 0.0 > low["return"].low
    assert high[name].high == 1.0 < high["return"].high


def test_each_length_is_a_stratum_of_its_own_with_its_own_interval() -> None:
    short, long = strata([(7, [True]), (3, [True]), (7, [False]), (3, [True]), (7, [False])])
    assert (short.shortest, short.longest, short.episodes, short.successes) == (3, 3, 2, 2)
    assert (long.shortest, long.longest, long.episodes, long.successes) == (7, 7, 3, 1)
    assert long.success == pytest.approx(wilson(1, 3))


def test_too_many_lengths_are_merged_in_order_with_about_equal_numbers_of_tasks() -> None:
    found = strata([(length, [True]) for length in (1, 1, 1, 1, 2, 3, 4, 5, 40, 90)], most=3)
    assert [(one.shortest, one.longest, one.episodes) for one in found] == [(1, 1, 4), (2, 4, 3), (5, 90, 3)]
