"""Accounting: every attempt at an episode ends in exactly one fate, and the sums say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from envkit.errors import EnvkitError, SandboxLostError
from envkit.trainer_bridge.accounting import Fate, Ledger, fate_before_training, trained_sessions
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.types import Outcome, Sample, StopReason, Task, Trajectory, ints
from tests.causes import cause
from tests.trainer_bridge.fakes import Answer
from tests.trainer_bridge.loop_parts import SETTINGS, Part
from tests.trainer_bridge.models import sample


def ledger_of(*sessions: str) -> Ledger:
    ledger = Ledger()
    for session in sessions:
        ledger.begin(session)
    return ledger


def played(key: str, stop: StopReason = StopReason.TERMINATED, attempt: int = 0) -> Trajectory:
    return Trajectory(Task("Scripted-v0", 0), 0, (), Outcome(stop=stop), key=key, attempt=attempt)


# --- The ledger ------------------------------------------------------------------------------------------------------


def test_the_sums_count_every_attempt_once() -> None:
    ledger = ledger_of("a.0", "b.0", "b.1", "c.0", "d.0", "e.0")
    ledger.end("b.0", Fate.VOIDED)
    ledger.end("c.0", Fate.FILTERED)
    ledger.end("d.0", Fate.STALE)
    ledger.end("e.0", Fate.ABORTED)
    ledger.settle(["a.0", "b.1"])
    assert ledger.counts() == {"begun": 6, "trained": 2, "filtered": 1, "stale": 1, "aborted": 1, "voided": 1}


def test_an_episode_without_a_fate_is_named() -> None:
    with pytest.raises(EnvkitError, match=r"^2 of 3 episodes have no fate: b\.0, c\.0$"):
        ledger_of("a.0", "b.0", "c.0").settle(["a.0"])


def test_an_error_names_a_few_episodes_and_counts_the_others() -> None:
    ledger = ledger_of(*(f"{number}.0" for number in range(9)))
    with pytest.raises(EnvkitError, match=r"^9 of 9 episodes have no fate: 0\.0, 1\.0, 2\.0, 3\.0, 4\.0, and 4 more$"):
        ledger.settle([])


def test_an_episode_that_ends_twice_never_began_or_begins_twice_is_an_error() -> None:
    ledger = ledger_of("a.0", "b.0")
    ledger.end("a.0", Fate.VOIDED)
    with pytest.raises(EnvkitError, match=r"^episode a\.0 ended twice: as voided, and then as trained$"):
        ledger.end("a.0", Fate.TRAINED)
    with pytest.raises(EnvkitError, match=r"^episode c\.0 ended as stale, but never began$"):
        ledger.end("c.0", Fate.STALE)
    with pytest.raises(EnvkitError, match=r"^episode b\.0 began twice$"):
        ledger.begin("b.0")


def test_settling_names_every_problem_and_settles_the_others() -> None:
    ledger = ledger_of("a.0", "b.0", "c.0")
    problems = r"^1 of 3 episodes have no fate: b\.0; episode a\.0 ended twice: .*; episode x ended as trained, but"
    with pytest.raises(EnvkitError, match=problems):
        ledger.settle(["a.0", "a.0", "x", "c.0"])
    assert ledger.counts()["trained"] == 2


@pytest.mark.parametrize(
    ("stop", "fate"),
    [
        (StopReason.TERMINATED, None),
        (StopReason.TRUNCATED, None),
        (StopReason.MAX_TURNS, None),
        (StopReason.CONTEXT_OVERFLOW, Fate.FILTERED),  # without a turn
        (StopReason.STALE, Fate.STALE),
        (StopReason.ABORTED, Fate.ABORTED),
        (StopReason.TIMEOUT, Fate.VOIDED),
        (StopReason.ENV_ERROR, Fate.VOIDED),
        (StopReason.SANDBOX_LOST, Fate.VOIDED),
        (StopReason.NO_COMPLETION, Fate.VOIDED),
    ],
)
def test_the_fate_of_an_episode_follows_from_its_end(stop: StopReason, fate: Fate | None) -> None:
    assert fate_before_training(played("a", stop)) is fate


# --- What was trained ------------------------------------------------------------------------------------------------


def parts_of(episode: int, *turns: int) -> list[Sample]:
    """The samples of an episode with one sample for each of these turns."""
    whole = sample([1, 5], ([6], [7]), episode=episode)
    return [replace(whole, turn_ids=ints([turn] * 3)) for turn in turns]


def test_several_samples_of_one_episode_are_one_training_of_it() -> None:
    attempts = [played("episode-0", attempt=2), played("episode-1"), played("episode-2")]
    samples = [*parts_of(0, 0, 1, 2), *parts_of(1, 0)]
    assert trained_sessions(samples, attempts) == ["episode-0.2", "episode-1.0"]


def test_a_turn_that_occurs_twice_is_a_second_training_and_an_unknown_episode_keeps_its_key() -> None:
    samples = [*parts_of(0, 0, 1), *parts_of(0, 1), *parts_of(5, 0)]
    assert trained_sessions(samples, [played("episode-0")]) == ["episode-0.0", "episode-0.0", "episode-5"]


# --- In a run --------------------------------------------------------------------------------------------------------


class Mixed(Part):
    """The first attempt at each episode of task 1 is lost; the prompts of task 2 are too long."""

    def script(self, task: Task, time: int) -> Sequence[Answer]:
        if task.seed == 1 and time < 2:
            return [Answer("s"), Answer(error=SandboxLostError("sb", cause("gone")))]
        if task.seed == 2:
            return [Answer("s" * 100)]
        return super().script(task, time)


def test_a_run_counts_the_fates_of_its_episodes_by_train_step_and_in_total(tmp_path: Path) -> None:
    part = Mixed(tmp_path, replace(SETTINGS, steps=2), eval_tasks=0).run()
    names = ("begun", "trained", "filtered", "stale", "aborted", "voided")
    counted = [[row[f"episodes_{name}"] for name in names] for row in part.notes.steps.values()]
    assert counted == [[6, 4, 0, 0, 0, 2], [4, 2, 2, 0, 0, 0]]
    state = checkpoint.load_state(tmp_path / "step-2")
    assert state.accounting == dict(zip(names, (10, 6, 2, 0, 0, 2), strict=True))
    assert (state.episodes, state.lost_episodes) == (10, 2)


def test_an_episode_whose_first_prompt_is_too_long_is_no_failure(tmp_path: Path) -> None:
    part = Mixed(tmp_path, replace(SETTINGS, steps=2), eval_tasks=0).run()
    # Task 3 fails; task 2, which would pay, is not played.
    assert part.notes.steps[2] | {"success": 0.0, "episodes": 2.0, "pass_at_group": 0.0} == part.notes.steps[2]


def test_a_train_step_whose_first_prompts_are_all_too_long_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    class TooLong(Part):
        def script(self, task: Task, time: int) -> Sequence[Answer]:
            return [Answer("s" * 100)]

    with pytest.raises(EnvkitError, match=r"^train step 1: all 4 episodes ended before .* reached rollout\.max_tokens"):
        TooLong(tmp_path, replace(SETTINGS, steps=1), eval_tasks=0).run()
