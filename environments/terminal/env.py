"""Terminal: work on a task in a shell of a sandbox. Tests of the task decide, in a sandbox of their own.

Observation  the task's instruction; later the results of the tools
Actions      calls of bash, view_file, edit_file and submit; with ``mode="screen"`` calls of type_keys and submit; with
             ``mode="script"`` any text, whose last block of bash (or else the whole text) runs as a script. The
             submission is what the task declares as its artifacts, mostly its working directory
Reward       from the task's tests, after the last action: mostly 1.0 or 0.0
Ends         terminated after submit or the script (of the last step, if the task has several); truncated after
             ``max_turns`` actions
Tasks        generated ones of ten families, the fifteen of envkit (a test set), or folders in the format of Harbor or
             Terminal-Bench
Options      see `TerminalOptions`, and the limits of `ToolEnv`
Info         ``task``, ``category``, ``level`` and ``folder`` (the working directory) of a reset; ``action_is_valid``:
             whether the action is a valid call
"""

from __future__ import annotations

import math
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import anyio
import msgspec

from envkit import clock
from envkit.errors import SandboxError, SandboxLostError, SandboxRefusedError
from envkit.installation import load
from envkit.metrics import Fold
from envkit.protocols import Sandbox, SandboxPool
from envkit.types import JSON, Info, Options, Reset, Step

from ..answer import code_block
from ..tasks import TaskEnv, Verdict, in_fresh_sandbox
from ..tools import ToolEnv, ToolFunction, bash, cut_middle, edit_file, submit, view_file, write_call
from .options import OF_TASK, TerminalOptions, options_of
from .screen import Screen
from .stage import BEGIN_S, TerminalStage, how_to_build, run_setup
from .tasks import Healthcheck, TerminalTask
from .verifier import VerifierError

_HEALTHY_S = 600.0
_SHELLS = ("bash", "sh", "shell")


class Terminal(TaskEnv):
    """An environment with one task per episode.

    Args:
        sandboxes: Leases the sandboxes of agents and verifiers.
        arguments: See `TerminalOptions` and `ToolEnv`; a task's options override single options for one episode.

    Raises:
        OptionError: An option is unknown or its value is invalid.
        UsageError: The mode is "screen", and the package pyte is not installed.
    """

    options: ClassVar[Options] = asdict(TerminalOptions())
    task: TerminalStage

    def __init__(self, *, sandboxes: SandboxPool, **arguments: Any) -> None:
        super().__init__(sandboxes=sandboxes, **arguments)
        self._screen = Screen()
        self._use(options_of(self._defaults).mode)
        self._episode_s, self._steps = math.inf, 1
        self._rewards: dict[TerminalStage, float] = {}

    @classmethod
    def check_options(cls, options: Options) -> None:
        options_of(options)

    @classmethod
    def task_of(cls, seed: int, options: Options) -> TerminalStage:
        chosen = options_of(options)
        return TerminalStage(chosen.task(seed), chosen)

    async def open_task(self, seed: int, options: Options) -> TerminalStage:
        mode = options_of(options).mode
        if mode != self._mode:
            self._use(mode)
        return await clock.to_thread(self.task_of, seed, options)

    @asynccontextmanager
    async def lease(self, seed: int, options: Options) -> AsyncIterator[Sandbox]:
        """Lease a sandbox with the environment of a task."""
        try:
            async with super().lease(seed, options) as sandbox:
                self.task = await self.task.located(sandbox)
                yield sandbox
        except SandboxRefusedError as error:
            chosen = self.task.options
            if self.task.task.is_portable and chosen.image != OF_TASK:
                raise
            raise SandboxRefusedError(error.sandbox_id, f"{error.cause} ({how_to_build(chosen)})") from None

    async def reset(self, *, seed: int, options: Options) -> Reset:
        """Start an episode; see `ToolEnv.reset`."""
        start = await super().reset(seed=seed, options=options)
        task, later = self.task.task, self.task.later
        self._rewards, self._steps = {}, 1 + len(later)
        if later:  # an action may contain a verification, and the begin of the next step
            self.grade_limit_s = max(one.judge_limit_s or 0.0 for one in (self.task, *later))
            extra_s = self.grade_limit_s + BEGIN_S + _HEALTHY_S
            start = msgspec.structs.replace(
                start,
                step_limit_s=(start.step_limit_s or 0.0) + extra_s,
                grade_limit_s=self.grade_limit_s,
                episode_limit_s=self._episode_s + len(later) * extra_s,
            )
        info: Info = {**start.info, "category": task.category, "level": _level(task), "folder": task.workdir}
        return msgspec.structs.replace(start, info=info, tools=() if self._mode == "script" else start.tools)

    async def start(self, seed: int, options: Options) -> str:
        task = self.task.task
        self._screen.cwd = task.workdir or None
        self._episode_s = self._limits.episode_timeout_s
        if not task.is_portable:
            await self.sandbox.exec(["mkdir", "-p", "/logs/agent", "/logs/artifacts", "/logs/verifier"], cwd="/")
        if task.healthcheck is not None:
            await _wait_until_healthy(self.sandbox, task, task.healthcheck)
        await self._begin(task)
        return self.task.statement

    async def step(self, action: str) -> Step:
        """Run the tool that the action calls; after the submission of a step, verify it and begin the next one."""
        step = await (self._run_script(action) if self._mode == "script" else super().step(action))
        task = self.task
        if self.submitted is None or not task.later or "sandbox_ended" in step.info:
            return step
        self._rewards[task] = await super().grade() or 0.0
        if self.sandbox_ended is not None or self._rewards[task] < task.task.min_reward:
            return step
        following, *rest = task.later
        try:
            await self._begin(following.task)
        except SandboxError as error:
            if isinstance(error, SandboxLostError) and not error.cause.by_agent:
                raise
            # The agent's earlier work prevents the next step
            text, is_last = f"The step was submitted. The next one cannot begin: {error}", True
        else:
            self.task, following.later = following, rest
            self.submitted, self._running = None, True
            text, is_last = f"The step was submitted. The next one:\n\n{following.task.instruction.strip()}", False
        observation = msgspec.structs.replace(step.observation, text=text)
        return msgspec.structs.replace(step, observation=observation, terminated=is_last)

    async def grade(self) -> float | None:
        """Verify the last step that the agent worked on, and return the reward of the task; see `judged`."""
        self.task.later = []  # no step follows, so `judged` releases the agent's sandbox before the tests run
        if self.task not in self._rewards:
            self._rewards[self.task] = await super().grade() or 0.0
        rewards = [*self._rewards.values(), *[0.0] * (self._steps - len(self._rewards))]
        return rewards[-1] if self.task.task.reward == "final" else sum(rewards) / len(rewards)

    async def _begin(self, task: TerminalTask) -> None:
        """Prepare the sandbox, its shell and the time limit for a step."""
        limit_s = self._used_s + (task.timeout_s or math.inf)
        self._limits = replace(self._limits, episode_timeout_s=min(self._episode_s, limit_s))
        if task.workdir:
            await self.sandbox.shell().run(f"cd -- {shlex.quote(task.workdir)}")
        if task.step_setup is not None:
            await self.sandbox.upload(task.step_setup, "/tmp/setup.sh")
            await run_setup(self.sandbox, task, "/tmp/setup.sh")
        if task.step_healthcheck is not None:
            await _wait_until_healthy(self.sandbox, task, task.step_healthcheck)

    async def _run_script(self, action: str) -> Step:
        script, is_valid = code_block(action, _SHELLS)
        step = await super().step(write_call("bash", command=script))
        self.submitted, self._running = "", False
        info: Info = {name: value for name, value in step.info.items() if not name.startswith("tool_call_")}
        info["action_is_valid"] = is_valid
        observation = msgspec.structs.replace(step.observation, role="user")
        return msgspec.structs.replace(step, observation=observation, terminated=True, truncated=False, info=info)

    async def judged(self) -> Verdict:
        """Verify a step.

        Raises:
            VerifierError: The tests wrote no valid reward, and do not write one without the agent's work either.
        """
        await self._screen.close()
        try:
            return await super().judged()
        except VerifierError as error:
            problem = str(error)
            if not self.task.later:
                await self.close()
            return await in_fresh_sandbox(
                self.sandboxes,
                self.task.judge_spec,
                partial(self.task.judge_without_work, error=error),
                ended=lambda cause: Verdict(reward=0.0, log=f"{problem}; then the sandbox has ended: {cause}"),
            )

    async def close(self) -> None:
        """Release the sandbox."""
        try:
            await self._screen.close()
        finally:
            await super().close()

    def _use(self, mode: str) -> None:
        """Set the tools and the metrics of a mode."""
        if mode == "screen":
            load("pyte")  # if it is missing, raise now and not in the first step
        tools: Mapping[str, Sequence[ToolFunction]] = {
            "bash": (bash, view_file, edit_file, submit),
            "screen": self._screen.tools,
            "script": (bash,),
        }
        self.use_tools(tools[mode])
        self._mode = mode
        metrics: Mapping[str, Fold] = {"action_is_valid": "mean"} if mode == "script" else ToolEnv.metrics
        self.metrics = metrics  # type: ignore[misc]  # those of the mode


def _level(task: TerminalTask) -> dict[str, JSON]:
    return {"difficulty": int(task.difficulty)} if task.difficulty.isdecimal() else {}


async def _wait_until_healthy(sandbox: Sandbox, task: TerminalTask, check: Healthcheck) -> None:
    """Run a healthcheck until it succeeds. Programs that it starts in the background keep running.

    Raises:
        SandboxError: It did not succeed, or did not do so within `_HEALTHY_S`.
    """
    shell = sandbox.shell("health")
    began_s, failures = clock.now(), 0
    if task.workdir:
        await shell.run(f"cd -- {shlex.quote(task.workdir)}")
    while True:
        done = await shell.run(f"({check.command}\n)", timeout_s=check.timeout_s)
        if done.exit_code == 0:
            return
        in_start_period = clock.now() - began_s < check.start_period_s
        failures += not in_start_period
        if failures >= check.retries or clock.now() - began_s > _HEALTHY_S:
            raise SandboxError(f"{task.name}: its healthcheck failed {failures} times: {cut_middle(done.stderr, 1000)}")
        await anyio.sleep(check.start_interval_s if in_start_period else check.interval_s)
