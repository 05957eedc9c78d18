"""One episode: its deadlines, which name the component that missed them, and other reasons to void it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.errors import DeadlineError, EnvkitError, UnreachableError
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits, play
from envkit.trainer_bridge.samples import samples_of
from envkit.types import Completion, FinishReason, Group, RolloutRequest, SamplingParams, StopReason, Task, Trajectory
from tests.trainer_bridge.fakes import Answer, LetterRenderer, ScriptedEngine, ScriptedEpisode, ScriptedHost, text_of

TASK = Task("Scripted-v0", 0)
REQUEST = RolloutRequest("train-1/00000000/0000", TASK, 0, seed=7)


class SlowEngine(ScriptedEngine):
    """Takes some seconds for each completion, after a wait, and ends them for a given reason."""

    def __init__(
        self, seconds: float = 0.0, finish: Sequence[FinishReason] = (FinishReason.LENGTH,), *, waits_s: float = 0.0
    ) -> None:
        super().__init__(lambda call: "xy")
        self._seconds = seconds
        self._waits_s = waits_s
        self._finish = list(finish)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **how: Any) -> Completion:
        await anyio.sleep(self._waits_s)
        await anyio.sleep(min(self._seconds, params.timeout_s))
        if self._seconds > params.timeout_s:
            raise DeadlineError(f"the engine did not complete a prompt within {params.timeout_s:g} s")
        completion = await super().generate(prompt_ids, params, **how)
        return replace(completion, finish=self._finish[min(len(self.calls), len(self._finish)) - 1])


class Host(ScriptedHost):
    """Records how its leases end, and makes episodes wait for their environment."""

    def __init__(self, *answers: Answer, waits_s: float = 0.0) -> None:
        super().__init__(lambda task, time: answers)
        self._waits_s = waits_s
        self.reusable: list[bool] = []

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[ScriptedEpisode]:
        await anyio.sleep(self._waits_s)
        async with super().lease(task) as episode:
            try:
                yield episode
            except BaseException:
                self.reusable.append(False)
                raise
            self.reusable.append(True)


def one(host: ScriptedHost, engine: ScriptedEngine | None = None, **limits: Any) -> tuple[Trajectory, float]:
    """Play one episode on virtual time; return it with its duration in seconds."""
    bounds = RolloutLimits(
        **{"max_turns": 4, "max_tokens": 100, "turn_tokens": 3, "step_timeout_s": 30.0, "retries": 0} | limits
    )

    async def main() -> tuple[Trajectory, float]:
        began = clock.now()
        player = PolicyPlayer(engine or ScriptedEngine(), LetterRenderer(), bounds)
        trajectory = await play(host, player, bounds, REQUEST)
        return trajectory, clock.now() - began

    return clock.run(main, virtual=True)


HUNG = Answer(after_s=3600)


@pytest.mark.parametrize(
    ("answers", "engine_s", "limits", "stop", "error", "seconds"),
    [
        ([HUNG], 0, {"reset_timeout_s": 90}, "timeout", "the environment did not answer a reset within 90 s", 90),
        ([Answer(), HUNG], 0, {"step_timeout_s": 7}, "timeout", "the environment did not answer a step within 7 s", 7),
        (
            [Answer()],
            3600,
            {"completion_timeout_s": 5},
            "no_completion",
            "the engine did not complete a prompt within 5 s",
            5,
        ),
        ([Answer(after_s=4)], 2, {"episode_timeout_s": 9}, "timeout", "the episode was not over within 9 s", 9),
    ],
    ids=["reset of its own", "step", "completion", "episode"],
)
def test_a_missed_deadline_voids_the_episode_and_names_the_component(
    answers: Sequence[Answer], engine_s: float, limits: dict[str, float], stop: str, error: str, seconds: float
) -> None:
    host = Host(*answers)
    trajectory, took_s = one(host, SlowEngine(engine_s), **limits)
    assert (trajectory.outcome.stop, trajectory.outcome.error, took_s) == (stop, error, seconds)
    assert trajectory.is_void
    assert host.reusable == [False]  # its environment may still be busy


@pytest.mark.parametrize(("after_s", "stop"), [(125, "truncated"), (131, "timeout")])
def test_a_deadline_is_longer_than_the_limit_of_the_environment_that_it_encloses(after_s: float, stop: str) -> None:
    answers = [Answer(limits_s=(100.0, None, 200.0)), Answer(after_s=after_s, ends="truncated")]
    trajectory, _ = one(Host(*answers), step_timeout_s=30, episode_timeout_s=60)
    assert trajectory.outcome.stop == stop
    answers = [Answer(limits_s=(100.0, None, 200.0)), Answer(after_s=120), Answer(after_s=after_s - 15)]
    trajectory, took_s = one(Host(*answers), step_timeout_s=30, episode_timeout_s=60, max_turns=2)
    assert (trajectory.outcome.stop, took_s) == ("timeout", 230)


def test_a_slow_engine_alone_misses_no_deadline() -> None:
    trajectory, took_s = one(Host(Answer(), Answer(), Answer(ends="terminated")), SlowEngine(3600))
    assert (trajectory.outcome.stop, took_s) == (StopReason.TERMINATED, 7200)


def test_a_wait_for_the_engine_is_no_part_of_a_completion() -> None:
    trajectory, took_s = one(
        Host(Answer(), Answer(ends="terminated")), SlowEngine(4, waits_s=3600), completion_timeout_s=5
    )
    assert (trajectory.outcome.stop, took_s) == (StopReason.TERMINATED, 3604)


def test_an_error_of_the_environment_about_time_is_not_mistaken_for_a_deadline() -> None:
    with pytest.raises(TimeoutError, match="from the environment"):
        one(Host(Answer(), Answer(error=TimeoutError("from the environment"))))


def test_waiting_for_an_environment_counts_against_no_deadline() -> None:
    trajectory, took_s = one(
        Host(Answer(after_s=2), Answer(after_s=3, ends="terminated"), waits_s=500), episode_timeout_s=6
    )
    assert (trajectory.outcome.stop, took_s) == (StopReason.TERMINATED, 505)
    assert (trajectory.began_s, trajectory.queue_s, trajectory.reset_s) == (0, 500, 2)
    assert [turn.step_s for turn in trajectory.turns] == [3]


def test_an_aborted_completion_ends_the_episode_without_a_step() -> None:
    host = Host(Answer())
    engine = SlowEngine(finish=[FinishReason.LENGTH, FinishReason.ABORTED])
    trajectory, _ = one(host, engine)
    assert (trajectory.outcome.stop, trajectory.is_void, trajectory.outcome.error) == (
        StopReason.ABORTED,
        True,
        "the engine aborted a completion",
    )
    assert host.episodes[0].actions == ["xy"]
    assert [turn.step is None for turn in trajectory.turns] == [False, True]
    assert text_of(trajectory.turns[1].completion.token_ids.tolist()) == "xy"
    assert samples_of([Group(TASK, (trajectory,))]) == []


class BrokenEngine(ScriptedEngine):
    """Fails with a given error at each completion."""

    def __init__(self, error: EnvkitError) -> None:
        super().__init__()
        self._error = error

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **how: Any) -> Completion:
        raise self._error


def test_an_error_of_the_engine_is_raised_and_not_taken_for_one_of_the_environment() -> None:
    with pytest.raises(UnreachableError, match="the engine does not answer"):
        one(Host(Answer()), BrokenEngine(UnreachableError("the engine does not answer")))
