"""Outcomes: when an episode succeeded, and that every reader agrees."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import pytest

from envkit.checks.tasks import PlayerResult, TaskEpisode
from envkit.cli.environments.episode_page import summary
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.evaluation.evaluator import success_of
from envkit.trainer_bridge.evaluation.outcomes import Tally, measure
from envkit.trainer_bridge.evaluation.rescore import Rescored, totals
from envkit.types import EpisodeRecord, Observation, Outcome, StopReason, Task, Trajectory, TurnRecord

T, F, U = True, False, None
# metric success, grade, return, success_return -> success
TABLE = [
    (1.0, None, 0.0, None, T),
    (0.99, None, 5.0, 1.0, F),
    (2.0, 0.0, 0.0, 9.0, T),
    (0.0, 1.0, 1.0, 0.0, F),
    (None, 1.0, 1.0, None, T),
    (None, 0.5, 9.5, 1.0, F),
    (None, None, 0.5, 0.5, T),
    (None, None, 0.4, 0.5, F),
    (None, None, 0.5, None, U),
    (None, None, -3.0, None, U),
    (math.nan, None, 1.0, None, U),
    (math.nan, 1.0, 1.0, None, T),
]
ENDS = [StopReason.TERMINATED, StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.CONTEXT_OVERFLOW]


Row: TypeAlias = tuple[float | None, float | None, float, float | None, bool | None]


def scored(row: Row, stop: StopReason) -> Outcome:
    metric, grade, reward, success_return, _ = row
    metrics = {"length": 3.0} if metric is None else {"length": 3.0, "success": metric}
    return Outcome.score(stop, reward, metrics, grade=grade, success_return=success_return)


@pytest.mark.parametrize("row", TABLE)
def test_success_follows_from_the_first_rule_that_applies_however_the_episode_ended(row: Row) -> None:
    for stop in (*ENDS, StopReason.PLAYER_TIMEOUT):
        found = scored(row, stop)
        assert (found.stop, found.reward, found.success, found.metrics) == (stop, row[2], row[4], {"length": 3.0})
        assert not found.is_void


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_could_not_be_computed_is_void_and_never_0(reward: float) -> None:
    found = Outcome.score(StopReason.TERMINATED, reward, {"success": 1.0})
    assert (found.is_void, found.stop, found.reward, found.success) == (True, StopReason.ENV_ERROR, None, None)


def record(outcome: Outcome, number: int) -> EpisodeRecord:
    about: dict[str, Any] = {"env_id": "Scripted-v0", "seed": number, "options": {}, "index": number, "member": 0}
    turn = TurnRecord(action="up", observation=Observation("."), reward=outcome.reward)
    return EpisodeRecord(**about, outcome=outcome, start=Observation("s"), start_info={}, turns=(turn,))


def test_every_reader_agrees_which_episodes_succeeded() -> None:
    void = Outcome.void(StopReason.SANDBOX_LOST, "killed")
    outcomes = [scored(row, ENDS[number % 4]) for number, row in enumerate(TABLE)] + [void]
    known = [one.success for one in outcomes if one.success is not None]
    assert (len(outcomes), len(known), sum(known)) == (13, 9, 5)
    records = [record(one, number) for number, one in enumerate(outcomes)]

    trained = [Trajectory(Task("Scripted-v0", 0), 0, (), one) for one in outcomes]
    assert success_of(trained) == sum(known) / len(known)
    tally = Tally(len(records), 1, SilentDisplay(), None)
    for one in records:
        tally.add(one)
    assert measure(tally.by_task, 1)["success"].mean == sum(known) / len(known)
    assert summary(records).endswith(": 5 succeeded, 4 failed, 3 ended, 1 lost")
    assert totals([Rescored(one, one) for one in records])["success"] == (sum(known) / len(known),) * 2
    episodes = [TaskEpisode(str(number), one) for number, one in enumerate(outcomes)]
    assert PlayerResult("oracle", episodes).successes == 5
    assert len(PlayerResult("oracle", episodes).problems()) == 13 - 5
    assert len(PlayerResult("nop", episodes).problems()) == 13 - 4
