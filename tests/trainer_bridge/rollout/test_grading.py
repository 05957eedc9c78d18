"""Grading after an episode: its reward, its failures, and that the engine does not wait for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import pytest

from envkit import clock
from envkit.errors import EnvError
from envkit.protocols import EnvHost
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits, play
from envkit.trainer_bridge.samples import samples_from
from envkit.trainer_bridge.scheduler import Rollout, RolloutResult
from envkit.types import Completion, Reset, RolloutRequest, SamplingParams, StopReason, Task, Trajectory
from tests.trainer_bridge.fakes import Answer, LetterRenderer, ScriptedEngine, ScriptedEpisode

TASK = Task("Scripted-v0", 0)
REQUEST = RolloutRequest("train-1/00000000/0000", TASK, 0, seed=7)
LIMITS = RolloutLimits(max_turns=4, max_tokens=100, turn_tokens=1, step_timeout_s=30, retries=1, grade_timeout_s=60)
ENDS = (Answer(), Answer(reward=0.5), Answer(reward=0.25, ends="terminated", info={"length": 2}))


@dataclass
class GradedEpisode(ScriptedEpisode):
    """Gives a grade, or raises it, after some seconds."""

    result: float | Exception | None = 1.0
    after_s: float = 0.0
    graded: int = field(default=0, init=False)

    async def reset(self) -> Reset:
        return msgspec.structs.replace(await super().reset(), is_graded=True)

    async def grade(self) -> float | None:
        self.graded += 1
        await anyio.sleep(self.after_s)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class GradingHost(EnvHost):
    """Leases episodes with the results in `results` in order; the last one is repeated."""

    capacity = 100

    def __init__(
        self, *results: float | Exception | None, after_s: float = 0.0, answers: Sequence[Answer] = ENDS
    ) -> None:
        self._results = results
        self._after_s = after_s
        self._answers = answers
        self.episodes: list[GradedEpisode] = []

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[GradedEpisode]:
        result = self._results[min(len(self.episodes), len(self._results) - 1)]
        self.episodes.append(GradedEpisode(self._answers, result=result, after_s=self._after_s))
        yield self.episodes[-1]


def graded(host: GradingHost) -> Trajectory:
    player = PolicyPlayer(ScriptedEngine(), LetterRenderer(), LIMITS)
    return clock.run(play, host, player, LIMITS, REQUEST, virtual=True)


def test_the_grade_is_part_of_the_last_turns_reward_and_of_the_metrics() -> None:
    trajectory = graded(GradingHost(1.0))
    assert (trajectory.outcome.stop, trajectory.outcome.grade, trajectory.outcome.reward) == (
        StopReason.TERMINATED,
        1.0,
        1.75,
    )
    assert trajectory.outcome.values == {"success": 1.0, "grade": 1.0}
    (sample,) = samples_from(trajectory)
    assert sample.rewards.tolist() == [0.5, 1.25]


def test_an_episode_that_the_policy_does_not_finish_is_graded_once() -> None:
    host = GradingHost(0.5, answers=[Answer()])
    trajectory = graded(host)
    assert (trajectory.outcome.stop, trajectory.outcome.grade, len(trajectory.turns)) == (StopReason.MAX_TURNS, 0.5, 4)
    assert trajectory.outcome.success is False
    assert host.episodes[0].graded == 1


@pytest.mark.parametrize(
    ("result", "after_s", "stop", "reason"),
    [
        (None, 0, StopReason.NO_GRADE, "the grader could not run"),
        (1.0, 61, StopReason.NO_GRADE, "the grader did not answer within 60 s"),
        (EnvError("Scripted-v0", "broken", "", ""), 0, StopReason.ENV_ERROR, "broken"),
    ],
)
def test_a_failed_grader_voids_the_episode(result: Any, after_s: float, stop: StopReason, reason: str) -> None:
    trajectory = graded(GradingHost(result, after_s=after_s))
    assert trajectory.outcome.stop is stop
    assert trajectory.is_void
    assert reason in str(trajectory.outcome.error)
    assert trajectory.outcome.reward is None


@pytest.mark.parametrize(("after_s", "stop"), [(125, StopReason.TERMINATED), (131, StopReason.NO_GRADE)])
def test_a_grader_may_take_as_long_as_its_own_limit(after_s: float, stop: StopReason) -> None:
    answers = [Answer(limits_s=(None, 100.0, None)), Answer(ends="terminated")]
    assert graded(GradingHost(1.0, after_s=after_s, answers=answers)).outcome.stop is stop


class SlowEngine(ScriptedEngine):
    """Takes a second for each completion, and counts the seconds in which it generates."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.busy_s = 0.0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **how: Any) -> Completion:
        self.running += 1
        began = clock.now()
        await anyio.sleep(1)
        self.running -= 1
        if not self.running:
            self.busy_s += clock.now() - began
        return await super().generate(prompt_ids, params, **how)


def rollout(host: GradingHost, engine: ScriptedEngine, tasks: int) -> tuple[RolloutResult, float]:
    async def main() -> tuple[RolloutResult, float]:
        began = clock.now()
        parts = Rollout(host, PolicyPlayer(engine, LetterRenderer(), LIMITS), LIMITS, num_envs=8)
        result = await parts.groups(
            [Task("Scripted-v0", number) for number in range(tasks)], 1, phase="train-1", temperature=1.0, seed=0
        )
        return result, clock.now() - began

    return clock.run(main, virtual=True)


def test_an_episode_without_a_grade_is_played_again() -> None:
    host = GradingHost(None, 1.0)
    result, _ = rollout(host, ScriptedEngine(), 1)
    assert [one.outcome.stop for one in result.void] == [StopReason.NO_GRADE]
    assert [one.outcome.grade for one in result.trajectories] == [1.0]


def test_graders_do_not_keep_the_engine_waiting() -> None:
    shares = []
    for grader_s in (0.0, 1.0):
        engine = SlowEngine()
        _, seconds = rollout(GradingHost(1.0, after_s=grader_s), engine, 8 * 25)
        shares.append(engine.busy_s / seconds)
    assert shares[0] == 1.0
    assert shares[1] >= 0.98
