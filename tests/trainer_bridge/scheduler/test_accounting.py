"""Accounting: every attempt at an episode ends in exactly one fate, and the sums say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from envkit.errors import EnvkitError, SandboxLostError
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.trainer_bridge.scheduler.accounting import Fate, Ledger, fate_before_training, trained_sessions
from envkit.types import Outcome, Sample, StopReason, Task, Trajectory, ints
from tests.causes import cause
from tests.trainer_bridge.fakes import Answer
from tests.trainer_bridge.loop_parts import SETTINGS, Part
from tests.trainer_bridge.models import sample


def ledger_of(*sessions: str, tokens: int = 0) -> Ledger:
    """A ledger in which these attempts have ended, without a fate."""
    ledger = Ledger()
    for session in sessions:
        ledger.ask(session)
        ledger.begin(session)
        ledger.receive(session, tokens)
        ledger.finish(session, tokens)
    return ledger


def played(key: str, stop: StopReason = StopReason.TERMINATED, attempt: int = 0) -> Trajectory:
    return Trajectory(Task("Scripted-v0", 0), 0, (), Outcome(stop=stop), key=key, attempt=attempt)


# --- The ledger ------------------------------------------------------------------------------------------------------


def counted(ledger: Ledger) -> dict[str, int]:
    """The counts that are not 0."""
    return {name: count for name, count in ledger.counts().items() if count}


def test_every_attempt_and_every_token_is_counted_once() -> None:
    ledger = ledger_of("a.0", "b.0", "b.1", "c.0", "d.0", "e.0", "f.0", "g.0", tokens=10)
    for session, fate in zip(
        "bcdef", (Fate.VOIDED, Fate.FILTERED, Fate.STALE, Fate.ABORTED, Fate.DROPPED), strict=True
    ):
        ledger.end(f"{session}.0", fate)
    ledger.end("a.0", Fate.TRAINED, masked={"lag": 3, "probe": 1})
    ledger.ask("h.0")
    ledger.ask("i.0")
    ledger.begin("i.0")
    ledger.receive("i.0", 3)
    assert counted(ledger) == {
        "asked": 10,
        **dict.fromkeys(("trained", "dropped", "filtered", "stale", "aborted", "voided", "queued", "in_flight"), 1),
        "finished": 2,
        "tokens_sampled": 83,
        "tokens_trained": 6,
        "tokens_masked_lag": 13,
        "tokens_masked_probe": 1,
        **dict.fromkeys(("tokens_filtered", "tokens_stale", "tokens_aborted", "tokens_voided"), 10),
        "tokens_in_flight": 3,
        "tokens_finished": 20,
    }
    assert ledger.problems(queued=1, in_flight=1, finished=2) == []


def test_attempts_that_the_scheduler_does_not_have_are_named() -> None:
    ledger = ledger_of(*(f"{number}.0" for number in range(9)))
    assert ledger.problems(queued=0, in_flight=0, finished=7) == [
        "9 attempts are entered as finished, and the scheduler has 7 (0.0, 1.0, 2.0, 3.0, 4.0, and 4 more)"
    ]


def test_an_attempt_out_of_order_is_a_problem_once() -> None:
    ledger = ledger_of("a.0")
    ledger.end("a.0", Fate.VOIDED)
    ledger.end("a.0", Fate.TRAINED)
    ledger.end("c.0", Fate.STALE)
    ledger.begin("c.0")
    ledger.ask("b.0")
    ledger.ask("b.0")
    ledger.begin("b.0")
    ledger.end("b.0", Fate.TRAINED)
    assert ledger.problems(queued=0, in_flight=1, finished=0) == [
        "episode a.0 ended as trained, but is not open: it has ended, or was never asked for",
        "episode c.0 ended as stale, but is not open: it has ended, or was never asked for",
        "episode c.0 is neither asked for nor open, and cannot become in_flight",
        "episode b.0 was asked for twice",
        "episode b.0 ended as trained, but is in progress",
    ]
    assert ledger.problems(queued=0, in_flight=1, finished=0) == []


def test_a_record_without_all_tokens_is_a_problem() -> None:
    ledger = Ledger()
    ledger.ask("a.0")
    ledger.begin("a.0")
    ledger.receive("a.0", 5)
    ledger.finish("a.0", 3)
    assert ledger.problems(queued=0, in_flight=0, finished=1) == [
        "episode a.0: 5 tokens were sampled, and its record has 3"
    ]


def test_what_was_in_progress_at_a_checkpoint_is_aborted_after_it() -> None:
    before = ledger_of("a.0", "b.0", tokens=7)
    before.end("a.0", Fate.TRAINED, masked={"lag": 2})
    before.ask("c.0")
    after = Ledger(before.counts())
    assert counted(after) == {
        "asked": 3, "trained": 1, "aborted": 2, "tokens_sampled": 14, "tokens_trained": 5, "tokens_masked_lag": 2,
        "tokens_aborted": 7,
    }  # fmt: skip
    assert after.problems(queued=0, in_flight=0, finished=0) == []


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
    names = ("asked", "trained", "filtered", "stale", "aborted", "voided")
    counted = [[row[f"episodes_{name}"] for name in names] for row in part.notes.steps.values()]
    assert counted == [[6, 4, 0, 0, 0, 2], [4, 2, 2, 0, 0, 0]]
    state = checkpoint.load_state(tmp_path / "step-2")
    assert [state.accounting[name] for name in names] == [10, 6, 2, 0, 0, 2]
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
