"""When what was lost is replaced."""

from __future__ import annotations

import anyio

from envkit.restarts import Failures, RestartBudget


def test_the_delay_doubles_to_a_bound_until_the_budget_is_spent() -> None:
    budget = RestartBudget(restarts=4, window_s=60, first_delay_s=0.5, longest_delay_s=3)
    failures = Failures()
    assert [failures.add(budget, now=now).at - now for now in (100, 110, 120, 130)] == [0.5, 1.0, 2.0, 3.0]
    assert failures.add(budget, now=140) == (
        160,
        "restart budget spent (4 in 60 s)",
    )  # when the first one leaves the window


def test_what_lies_before_the_window_or_is_excused_does_not_count() -> None:
    budget = RestartBudget(restarts=2, window_s=60, first_delay_s=0.5)
    failures, excuse = Failures(), anyio.Event()
    assert failures.add(budget, now=40).at == 40.5
    assert failures.add(budget, now=41, excuse=excuse).at == 42
    excuse.set()
    assert failures.add(budget, now=99).at == 100
    assert failures.add(budget, now=100).at == 101
