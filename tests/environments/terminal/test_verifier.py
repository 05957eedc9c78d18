"""Reading the summary of pytest in what the tests of a Terminal-Bench task print."""

from __future__ import annotations

import pytest

from envkit.environments.terminal.verifier import RewardFileError, pytest_reward


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("====== 3 passed in 0.12s ======\n", 1.0),
        ("== 1 passed, 2 warnings in 61.20s (0:01:01) ==", 1.0),
        ("= 1 failed, 2 passed in 1s =", 0.0),
        ("= 1 passed in 1s =\n= 1 error in 1s =\n", 0.0),
        ("= 1 passed, 1 skipped in 1s =", 0.0),
    ],
)
def test_only_passed_tests_in_the_last_summary_are_rewarded(output: str, reward: float) -> None:
    assert pytest_reward(output) == reward


@pytest.mark.parametrize(
    "output",
    [
        *("= " + "1 passed" * 8000, "= 1 passed in 1s" * 4000, "=" * 64_000, "= 1 in 1s =", ""),
        "= 1 passed in 1s =\n" + "x" * 2100,  # only the end is searched
    ],
)
def test_other_output_has_no_summary(output: str) -> None:
    with pytest.raises(RewardFileError):
        pytest_reward(output)
