"""Copies of envkit, or of a task's package, in the agent's sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit import clock
from envkit.environments.tasks.env import TaskEnv
from envkit.environments.tasks.task import SandboxTask
from envkit.errors import UsageError
from envkit.types import Options, SandboxSpec
from envkit.wiring.sandboxes.backends import open_tool_pool


class _Task(SandboxTask[None]):
    def __init__(self, spec: SandboxSpec, *modules: str) -> None:
        self.spec, self.modules = spec, modules


class _Env(TaskEnv):
    chosen = _Task(SandboxSpec(untrusted=True))

    @classmethod
    def task_of(cls, seed: int, options: Options) -> SandboxTask[None]:
        return cls.chosen


async def _reset(task: _Task, backend: str) -> None:
    class Env(_Env):
        chosen = task

    async with open_tool_pool(backend) as pool:
        env = Env(sandboxes=pool)
        await env.reset(seed=0, options={})
        await env.close()


@pytest.mark.bwrap
def test_a_sandbox_without_copies_is_used_and_one_with_envkit_or_the_package_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "envkit").mkdir()
    clock.run(_reset, _Task(SandboxSpec(untrusted=True), "no_such_package"), "local")
    with pytest.raises(UsageError, match="envkit is installed in the sandbox, at /opt/tools/envkit"):
        clock.run(_reset, _Task(SandboxSpec(views=((str(tmp_path), "/opt/tools"),))), "local")
    with pytest.raises(UsageError, match="json is installed in the sandbox, at /"):
        clock.run(_reset, _Task(SandboxSpec(untrusted=True), "json"), "local")


@pytest.mark.bwrap
def test_work_is_not_judged_beside_a_copy_even_if_the_episode_had_no_sandbox(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "envkit").mkdir()

    async def judge() -> None:
        async with open_tool_pool("local") as pool:
            env = _Env(sandboxes=pool)
            env.task = _Task(SandboxSpec(views=((str(tmp_path), "/opt/tools"),)))
            await env.judge_work(None)

    with pytest.raises(UsageError, match="envkit is installed in the sandbox, at /opt/tools/envkit"):
        clock.run(judge)


def test_processes_without_isolation_are_not_checked() -> None:
    clock.run(_reset, _Task(SandboxSpec()), "process")
