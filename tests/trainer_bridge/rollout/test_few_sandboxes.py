"""Episodes and graders that share a pool with few sandboxes, on virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envkit import clock
from envkit.environments.tasks import in_fresh_sandbox
from envkit.environments.tools import ToolEnv
from envkit.local_host import SlotHost
from envkit.protocols import Sandbox
from envkit.trainer_bridge.rollout import PolicyPlayer
from envkit.trainer_bridge.scheduler import Rollout, RolloutResult
from envkit.types import ExecResult, Options, SandboxSpec, SandboxState, Task
from tests.environments.tools.pools import pool_of
from tests.sandbox.fake.backend import Fate
from tests.trainer_bridge.fakes import LetterRenderer
from tests.trainer_bridge.rollout.test_grading import LIMITS, SlowEngine

SANDBOXES = 4
"""Number of sandboxes for which `pool_of` has memory."""


class Work(ToolEnv):
    """Takes two turns in a sandbox, and is graded in another one."""

    max_turns = 2

    async def start(self, seed: int, options: Options) -> str:
        return "work"

    async def grade(self) -> float | None:
        await self.submission()
        return await in_fresh_sandbox(self.sandboxes, SandboxSpec(), judge, ended=lambda cause: 0.0)


async def judge(sandbox: Sandbox) -> float:
    return float((await sandbox.exec(["test"])).exit_code == 0)


class ToolRenderer(LetterRenderer):
    """Renders the observations of an episode with tools as those without."""


@pytest.mark.parametrize("num_envs", [SANDBOXES, 2 * SANDBOXES])
def test_no_episode_waits_for_a_sandbox_until_its_deadline(num_envs: int) -> None:
    def slow(call: object) -> ExecResult:
        return ExecResult(0, b"", duration_s=1.0)

    async def main() -> tuple[RolloutResult, float, int]:
        began = clock.now()
        async with pool_of(Fate(answer=slow)) as (pool, _):
            limits = replace(LIMITS, max_tokens=100_000, reset_timeout_s=600, grade_timeout_s=600, retries=0)
            player = PolicyPlayer(SlowEngine(), ToolRenderer(), limits)
            host = SlotHost(lambda _: Work(sandboxes=pool), 100, lambda: sum(pool.counts().waiting.values()))
            rollout = Rollout(host, player, limits, num_envs)
            tasks = [Task("Work-v0", number) for number in range(16)]
            result = await rollout.groups(tasks, 1, phase="train-1", temperature=1.0, seed=0)
            return result, clock.now() - began, pool.counts().states.get(SandboxState.LEASED, 0)

    result, seconds, lent = clock.run(main, virtual=True)
    assert [one.outcome.error for one in result.void] == []
    assert [one.outcome.grade for one in result.trajectories] == [1.0] * 16
    assert seconds < 60
    assert lent == 0
