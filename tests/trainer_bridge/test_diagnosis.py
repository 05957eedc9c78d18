"""Diagnosis of a run that does not learn, from its metrics."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from envkit.trainer_bridge.diagnosis import STEPS, diagnose

Row = dict[str, float | None]

FINE: Row = {"success": 0.4, "action_is_valid": 0.9, "advantage_abs": 0.7, "cut_completions": 0.1}


def rows(changes: Mapping[str, float | None] = FINE, count: int = STEPS) -> list[Row]:
    return [{**FINE, **changes} for _ in range(count)]


def test_a_run_that_learns_has_no_findings() -> None:
    assert diagnose(rows()) == {}
    assert diagnose([]) == {}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("alike", {"advantage_abs": 0.0}, ["nothing to learn in the last 5 train steps", "rollout.group_size"]),
        ("alike", {"advantage_abs": 0.0, "success": 1.0}, ["every episode succeeded", "harder levels (env.options)"]),
        ("invalid", {"action_is_valid": 0.0}, ["no action of the last 5 train steps was valid", "trajectories/"]),
        ("cut", {"cut_completions": 0.75}, ["75% of the completions", "rollout.turn_tokens; raise it"]),
    ],
)
def test_each_finding_says_what_was_seen_and_what_to_try(
    name: str, changes: dict[str, float], words: list[str]
) -> None:
    found = diagnose(rows(changes))
    assert list(found) == [name]
    assert all(word in found[name] for word in words)


@pytest.mark.parametrize("changes", [{"advantage_abs": 0.0}, {"action_is_valid": 0.0}, {"cut_completions": 1.0}])
def test_one_good_step_among_the_last_is_no_finding_and_earlier_steps_do_not_count(changes: dict[str, float]) -> None:
    assert diagnose([*rows(changes, STEPS - 1), FINE]) == {}
    assert len(diagnose([FINE, *rows(changes)])) == 1


def test_a_short_run_is_judged_by_all_of_its_steps() -> None:
    assert "in the last train step:" in diagnose(rows({"advantage_abs": 0.0}, 1))["alike"]
    assert "in the last 2 train steps:" in diagnose(rows({"advantage_abs": 0.0}, 2))["alike"]


def test_figures_that_are_missing_or_no_number_are_no_finding() -> None:
    assert diagnose(rows({"success": None, "action_is_valid": None, "advantage_abs": None})) == {}
    assert diagnose([{"success": 0.0}]) == {}
