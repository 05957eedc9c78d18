"""Terminal: work on a task in a shell of a sandbox. Tests of the task decide, in a sandbox of their own.

Observation  the task's instruction; later the results of the tools
Actions      calls of bash, view_file, edit_file and submit; with ``mode="screen"`` calls of type_keys and submit; with
             ``mode="script"`` any text, whose last block of bash (or else the whole text) runs as a script. The
             submission is what the task declares as its artifacts, mostly its working directory
Reward       from the task's tests, after the last step: mostly 1.0 or 0.0
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
from envkit.types import JSON, Info, Observation, Options, Reset, Step

from ..answer import code_block
from ..tasks import TaskEnv, Verdict, in_fresh_sandbox
from ..tools import ToolEnv, ToolFunction, bash, cut_middle, edit_file, submit, view_file, write_call
from .options import OF_TASK, TerminalOptions, options_of
from .screen import Screen
from .stage import ScratchFolder, TerminalStage, how_to_build, run_setup
from .tasks import Healthcheck, TerminalTask
from .verifier import VerifierError

_HEALTHY_S = 600.0
_SHELLS = ("bash", "sh", "shell")


class Terminal(TaskEnv):
    """An environment with one task per episode.

    Args:
        sandboxes: Leases the sandboxes of agents and verifiers.
        judge: Not used.
        data: Not used.
        options: See `TerminalOptions` and `ToolEnv`; a task's options override single options for one episode.

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
        self._episode_s = math.inf
        self._verdicts: list[Verdict] = []

    @classmethod
    def check_options(cls, options: Options) -> None:
        options_of(options)

    @classmethod
    def task_of(cls, seed: int, options: Options) -> TerminalStage:
        chosen = options_of(options)
        if chosen.folder is not None:
            return TerminalStage(chosen.task(seed), chosen)
        scratch = ScratchFolder()
        return TerminalStage(chosen.task(seed, scratch.path), chosen, scratch=scratch)

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
        self._verdicts = []
        start = await super().reset(seed=seed, options=options)
        task = self.task.task
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
        await self._begin()
        return self.task.statement

    async def step(self, action: str) -> Step:
        """Run the tool that the action calls; after the submission of a step, verify it and begin the next one."""
        if self._mode == "script":
            script, is_valid = code_block(action, _SHELLS)
            step = await super().step(write_call("bash", command=script))
            self.submitted, self._running = "", False
            info: Info = {name: value for name, value in step.info.items() if not name.startswith("tool_call_")}
            info["action_is_valid"] = is_valid
            observation = msgspec.structs.replace(step.observation, role="user")
            step = msgspec.structs.replace(step, observation=observation, terminated=True, truncated=False, info=info)
        else:
            step = await super().step(action)
        task = self.task
        if self.submitted is None or self.sandbox_ended is not None or task.at + 1 == task.stages:
            return step
        verdict = await self.verdict(is_last=False)
        if verdict.reward < (task.step.min_reward or -math.inf):
            return step
        self.task = task.next()
        try:
            await self._begin()
        except SandboxLostError:
            raise
        except SandboxError as error:  # the agent's earlier work prevents the next step
            self.task = task
            text = f"The step was submitted. The next one cannot begin: {error}"
            return msgspec.structs.replace(step, observation=Observation(text, role=step.observation.role))
        self.submitted, self._running = None, True
        text = f"The step was submitted. The next one:\n\n{self.task.statement}"
        return msgspec.structs.replace(
            step, observation=Observation(text, role=step.observation.role), terminated=False
        )

    async def grade(self) -> float | None:
        """Verify the last step that the agent worked on, and return the reward of the task.

        Raises:
            VerifierError: See `verdict`.
        """
        if len(self._verdicts) == self.task.at:
            await self.verdict()
        rewards = [one.reward for one in self._verdicts]
        rewards += [0.0] * (self.task.stages - len(rewards))
        return rewards[-1] if self.task.task.reward == "final" else sum(rewards) / len(rewards)

    async def verdict(self, *, is_last: bool = True) -> Verdict:
        """Verify a step, and remember the verdict."""
        await self._screen.close()
        self._verdicts.append(await super().verdict(is_last=is_last))
        return self._verdicts[-1]

    async def judged(self, *, is_last: bool = True) -> Verdict:
        """Verify a step.

        Raises:
            VerifierError: The tests wrote no valid reward, and do not write one without the agent's work either.
        """
        try:
            return await super().judged(is_last=is_last)
        except VerifierError as error:
            problem = str(error)
            if is_last:
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

    async def _begin(self) -> None:
        """Prepare the sandbox, a new shell and the time limit for a step."""
        task, step = self.task.task, self.task.step
        limit_s = self._used_s + (step.timeout_s or math.inf)
        self._limits = replace(self._limits, episode_timeout_s=min(self._episode_s, limit_s))
        if task.workdir:
            await self.sandbox.shell().run(f"cd -- {shlex.quote(task.workdir)}")
        if step.setup is not None:
            await self.sandbox.upload(step.setup, "/tmp/setup.sh")
            await run_setup(self.sandbox, task, "/tmp/setup.sh")
        if step.healthcheck is not None:
            await _wait_until_healthy(self.sandbox, task, step.healthcheck)


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
