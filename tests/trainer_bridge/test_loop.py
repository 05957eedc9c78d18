"""The loop: order of rollouts, updates, evaluations and checkpoints, and resuming after an interruption."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envkit import clock
from envkit.errors import EnvkitError, SandboxLostError
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.evaluation.evaluator import Evaluator
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.trainer_bridge.run_folder.checkpoint import RunState
from envkit.trainer_bridge.scheduler import RolloutResult
from envkit.trainer_bridge.sources.demonstrations import unscored_sample
from envkit.trainer_bridge.sources.source import Source
from envkit.trainer_bridge.step_metrics import step_metrics
from envkit.types import Group, Outcome, Sample, StopReason, Task, Trajectory
from tests.causes import cause
from tests.trainer_bridge.fakes import Answer, Call, ScriptedEngine
from tests.trainer_bridge.loop_parts import PACE, SETTINGS, Part
from tests.trainer_bridge.plain import plain
from tests.trainer_bridge.run_folder.test_timeline import turn

NOTHING = ("dropped", "filtered", "stale", "aborted", "voided", "queued", "in_flight", "finished")
"""Fates and stages that no episode has."""


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- An unbroken run -------------------------------------------------------------------------------------------------


def test_a_run_evaluates_saves_and_learns_when_it_should(tmp_path: Path) -> None:
    part = Part(tmp_path).run()
    assert list(part.notes.steps) == [1, 2, 3, 4, 5, 6]
    assert list(part.notes.evaluations) == [0, 2, 4, 6]
    # Step 3 is due, and the others have the best evaluation so far, since all are equal; the newest two are kept.
    assert checkpoints(tmp_path) == ["step-4", "step-6"]
    assert [version for version, _ in part.trainer.taught] == [1, 2, 3, 4, 5, 6]
    assert part.engine.version == 6


def test_the_checkpoint_of_the_best_evaluation_is_kept_beside_the_newest(tmp_path: Path) -> None:
    part = Part(tmp_path)
    successes = {0: 0.3, 2: 0.9, 4: 0.5, 6: 0.6}

    class Scripted(Evaluator):
        async def run(self, display: object, step: int, engine: object = None) -> dict[str, float]:
            return {"eval_success": successes[step]}

    part.loop._evaluator = Scripted(part.loop._evaluator.rollout, [], temperature=1.0, seed=0)
    part.run()
    assert checkpoints(tmp_path) == ["step-2", "step-3", "step-6"]
    state = checkpoint.load_state(checkpoint.latest(tmp_path))
    assert (state.best_step, state.best_success) == (2, 0.9)


def test_every_train_step_plays_the_next_tasks_with_the_newest_weights(tmp_path: Path) -> None:
    part = Part(tmp_path, eval_tasks=0).run()
    for version, samples in part.trainer.taught:
        assert [sample.group for sample in samples] == [
            f"train/{n:08d}" for n in (2 * version - 2, 2 * version - 2, 2 * version - 1, 2 * version - 1)
        ]
        assert {one for sample in samples for one in sample.versions.tolist()} == {-1, version - 1}
    assert part.played == [number for number in range(12) for _ in range(2)]
    seeds = [call.params.seed for call in part.engine.calls]
    assert len(set(seeds)) == len(seeds) == 6 * 2 * 2 * 2


def test_the_numbers_of_a_step_are_those_of_its_episodes(tmp_path: Path) -> None:
    part = Part(tmp_path, replace(SETTINGS, steps=1)).run()
    # Tasks 0 and 1, each twice; only task 0 pays. Every episode reads 3 + 3 tokens and says 1 + 1.
    assert part.notes.steps[1] == {
        "success": 0.5,
        "pass_at_group": 0.5,
        "return": 0.5,
        "episode_turns": 2.0,
        "episodes": 4.0,
        "lost_episodes": 0.0,
        "lost_by_agent": 0.0,
        "lost_total": 0.0,
        "cut_completions": 0.0,
        "empty_actions": 0.0,
        "episodes_asked": 4.0,
        "episodes_trained": 4.0,
        **dict.fromkeys((f"episodes_{name}" for name in NOTHING), 0.0),
        "tokens_sampled": 8.0,
        "tokens_trained": 8.0,
        **dict.fromkeys(
            (f"tokens_{name}" for name in ("masked_lag", *NOTHING) if name not in ("dropped", "queued")), 0.0
        ),
        "groups_filtered": 0.0,
        "groups_missing": 0.0,
        "lag_mean": 0.0,
        "lag_max": 0.0,
        "lag_updates_max": 0.0,
        "lag_share_0": 1.0,
        "tokens": 32.0,
        "policy_version": 0.0,
        "policy_loss": part.trainer.weights / 2**32,
        "entropy_nats": 1.5,
    }


def test_an_evaluation_plays_the_same_tasks_with_the_same_seeds_sampled_and_greedily(tmp_path: Path) -> None:
    part = Part(tmp_path).run()
    # Tasks 1000, 1001 and 1002, of which two pay.
    two_thirds = pytest.approx(2 / 3)
    assert part.notes.evaluations[4] == {
        "eval_success": two_thirds,
        "eval_greedy": two_thirds,
        "eval_return": two_thirds,
        "eval_turns": 2.0,
        "eval_episodes": 3.0,
    }
    facts = part.loop.state.facts
    assert (facts["before"], facts["after"]) == (part.notes.evaluations[0], part.notes.evaluations[6])
    # 3 tasks, 2 turns, twice: 12 calls, four times; between them two train steps of 8 calls.
    heats = [(call.params.temperature, call.params.seed) for call in part.engine.calls]
    looks = [heats[first : first + 12] for first in (0, 28, 56, 84)]
    assert looks[0] == looks[1] == looks[2] == looks[3]
    assert [heat for heat, _ in looks[0]] == [0.9] * 6 + [0.0] * 6


def test_a_run_without_steps_evaluates_once_and_keeps_the_weights(tmp_path: Path) -> None:
    part = Part(tmp_path, replace(SETTINGS, steps=0)).run()
    assert list(part.notes.evaluations) == [0]
    assert part.notes.steps == {}
    assert checkpoints(tmp_path) == ["step-0"]
    assert part.loop.state.facts["before"] == part.loop.state.facts["after"]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (5, [1, 5, 6])])
def test_episodes_are_recorded_now_and_then_and_at_the_first_and_the_last_train_step(
    every: int, steps: list[int], tmp_path: Path
) -> None:
    part = Part(tmp_path, replace(SETTINGS, trajectories_every=every)).run()
    assert list(part.notes.shown) == steps
    assert all([one.train_step for one in shown] == [step] * 3 for step, shown in part.notes.shown.items())


# --- Evaluation beside training --------------------------------------------------------------------------------------


class Freezable(ScriptedEngine):
    """Can keep its weights for an evaluation; `copies` are the engines that have them."""

    def __init__(self, say: Callable[[Call], str]) -> None:
        super().__init__(say)
        self.copies: list[ScriptedEngine] = []

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[ScriptedEngine | None]:
        self.copies.append(ScriptedEngine())
        self.copies[-1].version = self.version
        yield self.copies[-1]


class Full(Freezable):
    """Has no room for other weights."""

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[ScriptedEngine | None]:
        yield None


class SlowEvaluations(Part):
    """The tasks of evaluations take time, and those of training do not."""

    def script(self, task: Task, time: int) -> Sequence[Answer]:
        answers = super().script(task, time)
        return [replace(one, after_s=5.0 * (task.seed >= 1000)) for one in answers]


def beside(folder: Path, engine: type[ScriptedEngine] = Freezable, *, ahead: int = 1, saves: int = 100) -> Part:
    settings = replace(SETTINGS, checkpoint_every=saves)
    return SlowEvaluations(folder, settings, pace=replace(PACE, ahead=ahead, max_lag=4), engine=engine)


@pytest.mark.parametrize(
    ("engine", "ahead", "saves", "after"),
    [
        (Freezable, 1, 100, {0: 0, 2: 4, 4: 6, 6: 6}),
        (Freezable, 1, 3, {0: 0, 2: 3, 4: 6, 6: 6}),  # a checkpoint has the evaluations before it
        (Full, 1, 100, {0: 0, 2: 2, 4: 4, 6: 6}),
        (ScriptedEngine, 1, 100, {0: 0, 2: 2, 4: 4, 6: 6}),
        (Freezable, 0, 100, {0: 0, 2: 2, 4: 4, 6: 6}),
    ],
)
def test_training_goes_on_beside_an_evaluation_if_the_engine_can_keep_its_weights(
    engine: type[ScriptedEngine], ahead: int, saves: int, after: dict[int, int], tmp_path: Path
) -> None:
    part = beside(tmp_path, engine, ahead=ahead, saves=saves).run()
    assert part.notes.evaluated_after == after
    assert part.loop.state.best_step == 6
    newest = checkpoint.latest(tmp_path)
    for path in tmp_path.iterdir():
        assert path == newest or checkpoint.load_state(path).facts["evaluated"] in range(max(after))
    copies = part.engine.copies if isinstance(part.engine, Freezable) else []
    assert [one.version for one in copies] == [step for step in (2, 4) if after[step] > step]
    for one in copies:
        assert {str(call.session).partition("-")[2].partition("-")[0] for call in one.calls} == {str(one.version)}
        assert len(one.calls) == 2 * 3 * 2  # sampled and greedy, three tasks of two turns


def test_a_wait_for_an_evaluation_is_measured(tmp_path: Path) -> None:
    def waits(engine: type[ScriptedEngine]) -> list[float]:
        part, found = beside(tmp_path / engine.__name__, engine), list[float]()
        part.notes.on_step = lambda values: found.append(round(values["evaluation_s"]))
        part.run()
        return found

    whole, *others = waits(Full)  # the evaluation before training always pauses it
    assert (whole > 0, others) == (True, [0, whole, 0, whole, 0])
    assert waits(Freezable) == [whole, 0, 0, 0, whole, 0]


def test_a_run_that_is_stopped_in_an_evaluation_beside_it_leaves_that_out(tmp_path: Path) -> None:
    part = beside(tmp_path)
    part.trainer.during_update = lambda: part.scope.cancel() if part.trainer.version == 2 else None
    part.run()
    assert (list(part.notes.steps), list(part.notes.evaluations)) == ([1, 2, 3], [0])
    resumed = beside(tmp_path).run()
    assert (list(resumed.notes.steps), list(resumed.notes.evaluations)) == ([4, 5, 6], [4, 6])
    assert resumed.loop.state.facts["before"] == part.notes.evaluations[0]


# --- What is lost ----------------------------------------------------------------------------------------------------


class Broken(Part):
    """Every first episode of an odd task is lost; those of task 3 always are."""

    def script(self, task: Task, time: int) -> Sequence[Answer]:
        if task.seed == 3 or (task.seed % 2 and time == 0):
            return [Answer("s"), Answer(error=SandboxLostError("sb", cause("gone")))]
        return super().script(task, time)


def test_lost_episodes_are_counted_and_not_learned_from(tmp_path: Path) -> None:
    part = Broken(tmp_path, replace(SETTINGS, steps=2), eval_tasks=0).run()
    # Step 1: task 1 is lost once, and played again. Step 2: task 3 is lost twice for each of its two members.
    assert [(row["episodes"], row["lost_episodes"], row["lost_total"]) for row in part.notes.steps.values()] == [
        (4.0, 1.0, 1.0),
        (2.0, 4.0, 5.0),
    ]
    assert [len(samples) for _, samples in part.trainer.taught] == [4, 2]
    assert (part.loop.state.episodes, part.loop.state.lost_episodes) == (5 + 6, 5)
    assert part.notes.steps[2]["success"] == 1.0  # of the two that are left
    assert part.notes.steps[2]["pass_at_group"] == 1.0  # of task 2


def test_a_group_that_lost_a_member_does_not_count_for_pass_at_group() -> None:
    def share(*groups: str) -> float:
        """Groups of won (w), failed (f) and void (v) episodes."""
        ends = {
            "w": Outcome.score(StopReason.TERMINATED, 1.0, {"success": 1.0}),
            "f": Outcome.score(StopReason.TRUNCATED, 0.0, {"success": 0.0}),
            "v": Outcome.void(StopReason.SANDBOX_LOST, "lost"),
        }
        task = Task("Scripted-v0", 0)
        played = [
            Group(
                task,
                tuple(
                    Trajectory(task, member, (turn(wait_s=0, generate_s=0, step_s=0),), ends[end])
                    for member, end in enumerate(group)
                ),
            )
            for group in groups
        ]
        return step_metrics(RolloutResult(tuple(played), ()), {}, {})["pass_at_group"]

    assert share("fw", "ff") == 0.5
    assert share("fw", "ff", "vw", "vf", "vv") == 0.5
    assert math.isnan(share("vw"))


class AllLost(Part):
    """All episodes are lost."""

    def script(self, task: Task, time: int) -> Sequence[Answer]:
        return [Answer(error=SandboxLostError("sb", cause("gone")))]


def test_a_step_whose_episodes_were_all_lost_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    part = AllLost(tmp_path, replace(SETTINGS, steps=1), pace=replace(PACE, groups_per_step=1))
    with pytest.raises(EnvkitError, match=r"^train step 1: all 2 episodes are void; the first ended as"):
        part.run()
    assert part.trainer.taught == []
    assert part.notes.steps == {}
    assert checkpoints(tmp_path) == ["step-0"]


# --- Interruptions ---------------------------------------------------------------------------------------------------


def progress(part: Part) -> RunState:
    """The state of a run, without the time that its imitation took."""
    facts = dict(part.loop.state.facts)
    if isinstance(imitation := facts.get("imitation"), dict):
        facts["imitation"] = {**imitation, "wall_s": 0.0}
    return replace(part.loop.state, facts=facts)


def same_as_unbroken(folder: Path, whole: Part, *parts: Part, **how: Any) -> None:
    """Resume after `parts`, and compare all parts with an uninterrupted run."""
    last = Part(folder, **how).run()
    steps: list[tuple[int, dict[str, float]]] = []
    evaluations: list[tuple[int, dict[str, float]]] = []
    taught: list[tuple[int, list[Sample]]] = []
    for part in (*parts, last):
        steps += part.notes.steps.items()
        evaluations += part.notes.evaluations.items()
        taught += part.trainer.taught
    assert steps == list(whole.notes.steps.items())
    assert evaluations == list(whole.notes.evaluations.items())
    assert plain(taught) == plain(whole.trainer.taught)
    assert (last.trainer.version, last.trainer.weights) == (whole.trainer.version, whole.trainer.weights)
    assert progress(last) == progress(whole)
    # An unfinished step is repeated; then all requests are the same as without the interruption.
    asked = [replace(call, at_s=0.0) for call in last.engine.calls]
    expected = [replace(call, at_s=0.0) for call in whole.engine.calls]
    assert asked == expected[len(expected) - len(asked) :]
    assert sum(len(part.engine.calls) for part in (*parts, last)) <= len(expected) + 12 * len(parts)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Part:
    """An uninterrupted run."""
    return Part(tmp_path_factory.mktemp("whole")).run()


@pytest.mark.parametrize("cut_at", [1, 12, 13, 37, 95])  # an evaluation is 12 calls, a train step 8
def test_a_run_interrupted_anywhere_continues_identically(cut_at: int, whole: Part, tmp_path: Path) -> None:
    assert len(whole.engine.calls) == 96
    first = Part(tmp_path / "cut")
    first.cut_at = cut_at
    first.run()
    assert first.scope.cancelled_caught
    assert first.loop.state.step == len(first.notes.steps) == first.trainer.version
    assert checkpoint.load_state(checkpoint.latest(tmp_path / "cut")).step == first.loop.state.step
    same_as_unbroken(tmp_path / "cut", whole, first)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    whole = Part(tmp_path).run()
    again = Part(tmp_path).run()
    assert (again.notes.steps, again.notes.evaluations, again.engine.calls) == ({}, {}, [])
    assert again.loop.state == whole.loop.state
    assert again.engine.version == 6


def test_saving_twice_writes_once(tmp_path: Path) -> None:
    part = Part(tmp_path).run()
    before = (tmp_path / "step-6").stat().st_mtime_ns
    clock.run(part.loop.save, virtual=True)
    assert (tmp_path / "step-6").stat().st_mtime_ns == before


def test_a_checkpoint_knows_how_long_the_run_took(tmp_path: Path) -> None:
    part = Part(tmp_path)
    part.seconds = 12.5
    part.run()
    assert checkpoint.load_state(tmp_path / "step-6").wall_s == 12.5


# --- Imitation -------------------------------------------------------------------------------------------------------


def source(updates: int, **how: Any) -> Source:
    return Source(updates, lambda update: [unscored_sample((1, update, 5), (0, 0, 1), (0, 0, 0))], **how)


def imitated(part: Part) -> list[int]:
    """The numbers in the samples of imitation that were learned, in order."""
    return [one.token_ids[1] for _, samples in part.trainer.taught for one in samples if one.group == ""]


def test_a_run_imitates_before_its_first_train_step_and_is_evaluated_before_and_after(tmp_path: Path) -> None:
    display: Any = Watching()
    part = Part(tmp_path, source=source(5, facts={"demonstrator_success": 0.5}))
    clock.run(lambda: part.loop.run(display), virtual=True)
    look = ("evaluate", 6, 6)
    assert display.parts[:4] == [look, ("imitate", 5, 5), look, ("train", 6, 2)]
    assert part.trainer.phases == [("imitation", 5), ("reinforcement", 6)]
    assert imitated(part) == [0, 1, 2, 3, 4]
    assert [version for version, _ in part.trainer.taught] == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6]
    facts, state = part.loop.state.facts, part.loop.state
    assert facts["untrained"] == part.notes.evaluations[0]  # the scripted tasks pay whatever the policy says
    assert list(part.notes.evaluations) == [0, 2, 4, 6]  # those of reinforcement alone
    made = {"demonstrator_success": 0.5, "updates": 5, "greedy_validation": None, "wall_s": 0.0}
    assert progress(part).facts["imitation"] == made
    assert (state.imitated, state.step) == (5, 6)


@pytest.mark.parametrize(
    ("updates", "checks_from", "goal", "checked"),
    [
        (80, 40, 0.75, [50, 75]),  # the first check that is due after 40 is not good enough
        (80, 40, 1.0, [50, 75, 80]),  # never good enough: there is a last check
        (9, 0, 1.0, [5, 9]),  # a short phase is checked in the middle
    ],
)
def test_imitation_ends_at_the_first_check_that_reaches_the_goal(
    updates: int, checks_from: int, goal: float, checked: list[int], tmp_path: Path
) -> None:
    phase = source(updates, checks_from=checks_from)
    part = Part(tmp_path, replace(SETTINGS, steps=0), source=phase, greedy=lambda one: one / 100, goal=goal).run()
    assert part.checked == checked
    assert part.loop.state.imitated == len(imitated(part)) == checked[-1]
    facts: Any = part.loop.state.facts["imitation"]
    assert (facts["updates"], facts["greedy_validation"]) == (checked[-1], checked[-1] / 100)


def test_a_checkpoint_is_written_every_hundred_updates_of_imitation(tmp_path: Path) -> None:
    part = Part(tmp_path, replace(SETTINGS, steps=0), source=source(250))
    saved: list[tuple[int, str]] = []
    save = part.trainer.save

    async def note(folder: str) -> None:
        saved.append((part.loop.state.imitated, part.trainer.phases[-1][0] if part.trainer.phases else ""))
        await save(folder)

    part.trainer.save = note  # type: ignore[method-assign]
    part.run()
    assert saved == [(0, ""), (0, ""), (100, "imitation"), (200, "imitation"), (250, "reinforcement")]
    assert checkpoints(tmp_path) == ["step-0"]


PHASE: dict[str, Any] = {"source": source(130), "greedy": lambda update: 0.5}


@pytest.fixture(scope="module")
def whole_phase(tmp_path_factory: pytest.TempPathFactory) -> Part:
    """An uninterrupted run that imitates first."""
    return Part(tmp_path_factory.mktemp("whole"), **PHASE).run()


@pytest.mark.parametrize(
    ("updates", "calls"),  # 130 updates of imitation, then 6 train steps; calls of the evaluations around imitation
    [*((updates, None) for updates in (1, 100, 130, 131)), *((0, calls) for calls in (12, 13))],
)
def test_a_run_interrupted_in_imitation_or_the_evaluations_around_it_continues_identically(
    updates: int, calls: int | None, whole_phase: Part, tmp_path: Path
) -> None:
    first = Part(tmp_path, **PHASE)
    first.cut_at = calls
    first.trainer.during_update = lambda: first.scope.cancel() if len(first.trainer.taught) == updates - 1 else None
    first.run()
    assert first.scope.cancelled_caught
    assert calls or len(first.trainer.taught) == updates
    same_as_unbroken(tmp_path, whole_phase, first, **PHASE)


def test_an_error_in_an_update_of_imitation_leaves_the_last_checkpoint(whole_phase: Part, tmp_path: Path) -> None:
    first = Part(tmp_path / "cut", **PHASE)

    def fail() -> None:
        if first.trainer.version == 120:
            raise RuntimeError("out of memory")

    first.trainer.during_update = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        first.run()
    clock.run(first.loop.save, virtual=True)  # the weights may be half of an update: nothing is saved
    second = Part(tmp_path / "cut", **PHASE).run()
    assert imitated(second) == list(range(100, 130))
    assert second.trainer.weights == whole_phase.trainer.weights


# --- What is shown ---------------------------------------------------------------------------------------------------


class Watching(SilentDisplay):
    """Counts the progress of each part of the run."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, int, int]] = []

    def phase(self, name: str, total: int) -> None:
        self.parts.append((name, total, 0))

    def advance(self, count: int = 1, **shown: float | str) -> None:
        name, total, done = self.parts[-1]
        self.parts[-1] = (name, total, done + count)
