"""Hangs: an action that hangs again in two fresh environments fails its episode; anything else is void."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from envkit import clock
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits
from envkit.trainer_bridge.scheduler.continuous import Continuous
from envkit.trainer_bridge.scheduler.pace import Batch, Pace
from envkit.types import StopReason, Task, Trajectory
from tests.trainer_bridge.fakes import Answer, LetterRenderer, ScriptedEngine, ScriptedHost

HANGS = Answer(after_s=1000.0)
FIRST = Answer("s", info={"metrics": {"success": "last"}})
STEPS = [Answer("t", 0.25, after_s=5.0, info={"success": False}), Answer("", 1.0, "terminated", info={"success": True})]


class Host(ScriptedHost):
    """The task 0 hangs in the second step: always, the first time, or with other observations the second time."""

    def __init__(self, kind: str) -> None:
        super().__init__(self._answers)
        self.kind = kind

    def _answers(self, task: Task, time: int) -> Sequence[Answer]:
        if task.seed != 0 or (self.kind == "once" and time > 0):
            return [FIRST, *STEPS]
        seen = f"{time}" if self.kind == "differently" else "t"
        return [FIRST, Answer(seen, 0.25, info={"success": True}), HANGS]


def played(kind: str, others: int = 20) -> list[Trajectory]:
    """The attempts at the tasks of a batch, in which task 0 may hang."""
    engine, host = ScriptedEngine(), Host(kind)
    engine.repeats = False
    limits = RolloutLimits(max_turns=5, max_tokens=100, turn_tokens=1, step_timeout_s=30.0, retries=1)
    pace = Pace(steps=1, groups_per_step=1 + others, group_size=1, fails_hangs=True)
    # With one place more than hangs need, the others go on meanwhile.
    plan = Continuous(
        host, PolicyPlayer(engine, LetterRenderer(), limits), limits, 2, pace, lambda env, n: Task("A-v0", n)
    )

    async def main() -> Batch:
        async with clock.background_tasks() as tasks:
            tasks.start_soon(plan.run)
            return await plan.batch()

    batch = clock.run(main, virtual=True)
    assert host.lent == 0
    return [one for one in batch.attempts if one.task.seed == 0]


def test_an_action_that_always_hangs_fails_its_episode_with_the_rewards_so_far() -> None:
    (one,) = played("always")
    assert (one.outcome.stop, one.outcome.reward, one.outcome.success) == (StopReason.HUNG, 0.25, False)
    assert [turn.step is None for turn in one.turns] == [False, True]


@pytest.mark.parametrize("kind", ["once", "differently"])
def test_an_episode_that_hangs_once_or_elsewhere_is_void_and_played_again(kind: str) -> None:
    attempts = played(kind)
    assert StopReason.HUNG not in {one.outcome.stop for one in attempts}
    assert StopReason.TIMEOUT in {one.outcome.stop for one in attempts}


def test_if_nothing_else_goes_on_the_machine_may_be_to_blame() -> None:
    assert {one.outcome.stop for one in played("always", others=0)} == {StopReason.TIMEOUT}
