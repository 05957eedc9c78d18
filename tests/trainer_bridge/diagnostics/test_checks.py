"""The checks of recorded events: what each finding needs, what it says, and what excuses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import pytest

from envkit.config.training import FindingName
from envkit.trainer_bridge.diagnostics import checks
from envkit.trainer_bridge.diagnostics.checks import INVALID_STEPS, STEPS, Finding, PushProbe, TrainStep, of_metrics

Row = dict[str, float | None]

FINE: Row = {
    "success": 0.4,
    "action_is_valid": 0.9,
    "empty_actions": 0.0,
    "advantage_abs": 0.7,
    "cut_completions": 0.1,
    "entropy_nats": 1.0,
    "approx_kl": 0.001,
    "updates": 2.0,
    "learning_rate": 5e-4,
    "sampler_gap_nats": 1e-6,
}


def rows(changes: Mapping[str, float | None] = FINE, count: int = STEPS) -> list[Row]:
    return [{**FINE, **changes} for _ in range(count)]


def found(some: list[Row], *, is_over: bool = False) -> dict[str, str]:
    first = next(iter(some), None)
    findings = of_metrics(first, some, tolerance_nats=1e-3, is_over=is_over)
    assert len({one.name for one in findings}) == len(findings)
    return {one.name: one.line for one in findings}


def test_the_configuration_knows_every_finding() -> None:
    names = {value for name, value in vars(checks).items() if name.isupper() and isinstance(value, str)}
    assert {*get_args(FindingName)} == names


# --- Metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("every_group_filtered", {"advantage_abs": 0.0}, ["nothing to learn in the last 5", "rollout.group_size"]),
        ("every_group_filtered", {"advantage_abs": 0.0, "success": 1.0}, ["every episode succeeded", "env.options"]),
        ("no_valid_action", {"action_is_valid": 0.0}, ["no action of the last 10 train steps was valid"]),
        ("no_valid_action", {"action_is_valid": None, "empty_actions": 1.0}, ["every action", "check-template"]),
        ("completions_cut_off", {"cut_completions": 0.75}, ["75% of the completions", "rollout.turn_tokens; raise it"]),
        ("ratio_always_1", {"approx_kl": 1e-12}, ["ratio was 1 for every token in all 2 updates", "old_logprobs"]),
        ("engine_disagrees", {"sampler_gap_nats": 0.02}, ["differ by 0.02 nats per token (limit 0.001)"]),
    ],
)
def test_each_finding_says_what_was_seen_and_what_to_try(
    name: str, changes: dict[str, float | None], words: list[str]
) -> None:
    seen = found(rows(changes, INVALID_STEPS))
    assert list(seen) == [name]
    assert all(word in seen[name] for word in words)


@pytest.mark.parametrize("changes", [{"advantage_abs": 0.0}, {"action_is_valid": 0.0}, {"cut_completions": 1.0}])
def test_one_good_step_among_the_last_is_no_finding_and_earlier_steps_do_not_count(changes: dict[str, float]) -> None:
    assert found([*rows(changes, STEPS - 1), FINE]) == {}
    assert len(found([FINE, *rows(changes, INVALID_STEPS)])) == 1


def test_steps_without_a_valid_action_are_reported_as_soon_as_there_are_that_many_and_as_nothing_else() -> None:
    bad = {"action_is_valid": 0.0, "advantage_abs": 0.0, "success": 0.0}  # all fail alike
    for count in (STEPS, 9):
        assert found(rows(bad, count)) == {}
    assert list(found(rows(bad, 10))) == ["no_valid_action"]
    # A run that ends before reports it if there never was a valid action, and otherwise what is certain.
    assert list(found(rows(bad, 9), is_over=True)) == ["no_valid_action"]
    assert list(found([FINE, *rows(bad, 6)], is_over=True)) == ["every_group_filtered"]


def test_entropy_collapses_if_it_falls_and_the_tasks_are_not_solved() -> None:
    gone: Row = {"entropy_nats": 0.01, "advantage_abs": 0.0}
    assert list(found([FINE, *rows(gone)])) == ["entropy_collapse"]
    assert found([FINE, *rows(gone, STEPS - 1)]) == {}
    assert found([FINE, *rows({"entropy_nats": 0.03})]) == {}
    assert found([FINE, *rows({"entropy_nats": 0.01, "success": 1.0})]) == {}
    # Nearly greedy from the start: nothing fell.
    assert found([{**FINE, "entropy_nats": 0.005}, *rows({"entropy_nats": 1e-5})]) == {}
    # Unknown: all samples were skipped, since their advantages were 0.
    assert found([FINE, *rows({"entropy_nats": 0.0, "learned_tokens": 0.0})]) == {}


@pytest.mark.parametrize(
    "changes", [{"updates": 1.0}, {"updates": None}, {"advantage_abs": 0.0}, {"learning_rate": 0.0}]
)
def test_a_ratio_of_1_is_right_with_one_update_or_without_a_gradient(changes: Row) -> None:
    assert found([FINE, {**FINE, "approx_kl": 0.0, **changes}]) == {}


def test_metrics_that_are_missing_or_no_number_are_no_finding() -> None:
    assert found(rows(dict.fromkeys(FINE, None))) == {}
    assert found([{"success": 0.0}] * STEPS) == {}


def test_an_engine_whose_log_probabilities_are_no_numbers_disagrees() -> None:
    assert list(found([{**FINE, "sampler_gap_nats": float("nan")}])) == ["engine_disagrees"]


# --- Weights ---------------------------------------------------------------------------------------------------------

BEFORE = PushProbe(1, True, (5, 6), (-0.5, -1.0), (-0.5, -1.0))


def stuck(after: PushProbe) -> Finding | None:
    return checks.weights_not_applied(BEFORE, after, resolution_nats=1e-5)


@pytest.mark.parametrize(
    "after",
    [
        replace(BEFORE, is_changed=False, trainer_logprobs=(-0.5, -1.01)),  # rounded away in the engine's format
        replace(BEFORE, trainer_logprobs=(-0.5, -1.000001)),  # too small to be seen
        replace(BEFORE, token_ids=(5, 7), trainer_logprobs=(-0.5, -1.5)),
        replace(BEFORE, engine_logprobs=(-0.5, -1.00001), trainer_logprobs=(-0.5, -1.5)),
    ],
)
def test_equal_output_alone_proves_nothing(after: PushProbe) -> None:
    assert stuck(after) is None


# --- Samples ---------------------------------------------------------------------------------------------------------


VOIDS = {"bash while": 9, "submit": 1}
PLAYED = {"submit": 30, "bash ls": 30}


@pytest.mark.parametrize(
    ("void", "played", "is_found"),
    [
        (VOIDS, PLAYED, True),
        ({"bash while": 7}, PLAYED, False),  # too few
        ({"bash while": 9, "submit": 9}, PLAYED, False),  # after others, too
        ({"submit": 9}, PLAYED, False),  # mostly valid after it
        ({"submit": 60}, {}, False),  # all are void: not the choice of the policy
        ({}, PLAYED, False),
    ],
)
def test_a_policy_that_leaves_episodes_by_one_kind_of_action_is_named(
    void: dict[str, int], played: dict[str, int], is_found: bool
) -> None:
    finding = checks.void_after_action([TrainStep(1, {}, 8), TrainStep(2, {}, 8, "", void, played)])
    assert (finding is not None) == is_found
    if finding is not None:
        assert finding.line.startswith("9 of the 10 void episodes of the last 2 train steps ended with an action")
        assert "kind 'bash while', after which only 0 others" in finding.line


@pytest.mark.parametrize(
    ("recorded", "words"),
    [
        ([1, 3], "2 rows for 3 train steps: row 2 is not that of train step 2"),
        ([1, 2, 2, 3], "4 rows for 3 train steps: row 3 is not"),
        ([1, 3, 2], "3 rows for 3 train steps: row 2 is not"),
        ([], "0 rows for 3 train steps: row 1 is not"),
    ],
)
def test_recorded_train_steps_must_be_complete_and_in_order(recorded: list[int], words: str) -> None:
    finding = checks.steps_lost_or_repeated(recorded, 3)
    assert finding is not None
    assert words in finding.line
    assert checks.steps_lost_or_repeated([1, 2, 3], 3) is None
    assert checks.steps_lost_or_repeated([], 0) is None
