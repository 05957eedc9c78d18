"""When what was lost is replaced."""

from __future__ import annotations

import pytest

from envkit.restarts import RestartBudget, restart_delay


@pytest.mark.parametrize(
    ("ages", "delay"), [([], 0.5), ([10], 1.0), ([10, 20], 2.0), ([10, 20, 30], 3.0), ([10, 20, 30, 40], None)]
)
def test_the_delay_doubles_to_a_bound_until_the_budget_is_spent(ages: list[float], delay: float | None) -> None:
    budget = RestartBudget(restarts=4, window_s=60, first_delay_s=0.5, longest_delay_s=3)
    assert restart_delay([100 - age for age in ages], budget, now=100) == delay


def test_what_lies_before_the_window_is_forgotten() -> None:
    budget = RestartBudget(restarts=2, window_s=60, first_delay_s=0.5)
    assert restart_delay([0, 30, 40], budget, now=100) == 0.5
    assert restart_delay([0, 30, 41], budget, now=100) == 1.0
