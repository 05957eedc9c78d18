"""Terminal: work on a task in a shell of a sandbox. Tests of the task decide, in a sandbox of their own.

Observation  the task's instruction; later the results of the tools
Actions      calls of bash, view_file, edit_file and submit; with ``mode="screen"`` calls of type_keys and submit; with
             ``mode="script"`` any text, whose last block of bash (or else the whole text) runs as a script. The
             submission is what the task declares as its artifacts, mostly its working directory
Reward       from the task's tests, after the last step: mostly 1.0 or 0.0
Ends         terminated after submit or the script, in a task of several steps after those of its last step; truncated
             after ``max_turns`` actions
Tasks        generated ones of ten families, the fifteen of envkit (a test set), or folders in the format of Harbor or
             Terminal-Bench
Options      see `TerminalOptions`, and the limits of `ToolEnv`
Info         ``task``, ``category`` and ``level`` of a reset; ``action_is_valid``: whether the action is a valid call
"""

from __future__ import annotations

import math
import secrets
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, TypeAlias

import anyio
import msgspec

from envkit import clock
from envkit.errors import SandboxError, SandboxRefusedError, UsageError
from envkit.installation import load
from envkit.metrics import Fold
from envkit.protocols import Judge, Sandbox, SandboxPool
from envkit.types import JSON, Info, Observation, Options, Reset, SandboxSpec, Step

from ..answer import code_block
from ..tools import ToolEnv, ToolFunction, bash, edit_file, submit, view_file, write_call
from ..tools.limits import LEASE_S, cut_middle
from ..tools.prepared import lease_prepared
from .images import image_of, verifier_image_of
from .options import OF_TASK, OWN, TerminalOptions, options_of
from .screen import ScreenTools
from .tasks import WORK, Healthcheck, TaskStep, TerminalTask
from .verifier import Verdict, end_processes, pack, pack_tests, run_tests, verify

_SETUP_S = 300.0
_HEALTHY_S = 600.0
_SHELLS = ("bash", "sh", "shell")
_Files: TypeAlias = Mapping[str, tuple[bytes, int]]
"""Content and mode of files by path."""
_NOT_UPLOADED = ("Dockerfile", ".dockerignore")


class Terminal(ToolEnv):
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
    _task: TerminalTask
    _chosen: TerminalOptions
    _spec: SandboxSpec
    _tests: Sequence[bytes] | None = None
    """The tests of a generated task, whose folder is removed before the episode begins."""

    def __init__(
        self,
        *,
        sandboxes: SandboxPool,
        judge: Judge | None = None,
        data: Mapping[str, Path] | None = None,
        **options: JSON,
    ) -> None:
        super().__init__(sandboxes=sandboxes, judge=judge, data=data, **options)
        self._screen = ScreenTools()
        self._use(options_of(options).mode)  # rejects wrong values
        self._at = 0
        self._episode_s = math.inf
        self._verdicts: list[Verdict] = []

    @asynccontextmanager
    async def lease(self, seed: int, options: Options) -> AsyncIterator[Sandbox]:
        """Lease a sandbox with the environment of a task."""
        self._chosen = chosen = options_of(options)
        if chosen.mode != self._mode:
            self._use(chosen.mode)
        self._tests = files = None
        if chosen.folder is None:
            self._task, self._tests, files = await clock.to_thread(_generated, chosen, seed)
        else:
            self._task = await clock.to_thread(chosen.task, seed)
        self._spec = await clock.to_thread(spec_of, self._task, chosen)  # reads the files of an image
        prepare = partial(_prepare, task=self._task, files=files, how_to_build=_how_to_build(chosen))
        # Most generated tasks are played only a few times.
        is_kept = self._task.is_portable and files is None
        leased = (
            lease_prepared(self.sandboxes, self._spec, self._task.folder, prepare)
            if is_kept
            else self.sandboxes.lease(self._spec, wait_s=LEASE_S)
        )
        try:
            async with leased as sandbox:
                if files is not None:
                    await prepare(sandbox)
                if self._task.workdir_of_image:
                    shown = await sandbox.exec(["sh", "-c", 'echo "$ENVKIT_WORKDIR"'], cwd="/")
                    self._task = replace(self._task, workdir=shown.stdout.strip() or self._task.workdir)
                yield sandbox
        except SandboxRefusedError as error:
            if self._task.is_portable and chosen.image != OF_TASK:
                raise
            raise SandboxRefusedError(error.sandbox_id, f"{error.cause} ({_how_to_build(chosen)})") from None

    async def reset(self, *, seed: int, options: Options) -> Reset:
        """Start an episode; see `ToolEnv.reset`."""
        self._at, self._verdicts = 0, []
        start = await super().reset(seed=seed, options=options)
        more: dict[str, JSON] = {"task": self._task.name, "category": self._task.category}
        info: Info = {**start.info, **more, "level": _level(self._task)}
        return msgspec.structs.replace(start, info=info, tools=() if self._mode == "script" else start.tools)

    async def start(self, seed: int, options: Options) -> str:
        task = self._task
        self._screen.cwd = task.workdir or None
        self._episode_s = self._limits.episode_timeout_s
        if not task.is_portable:
            await self.sandbox.exec(["mkdir", "-p", "/logs/agent", "/logs/artifacts", "/logs/verifier"], cwd="/")
        if task.healthcheck is not None:
            await _wait_until_healthy(self.sandbox, task, task.healthcheck)
        await self._begin(task.steps[0])
        return f"{_introduction(self._mode, task.workdir)}\n\n{task.steps[0].instruction.strip()}"

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
        steps = self._task.steps
        if self.submitted is None or self.sandbox_ended is not None or self._at + 1 == len(steps):
            return step
        verdict = await self._verify(is_last=False)
        self._verdicts.append(verdict)
        if verdict.reward < (steps[self._at].min_reward or -math.inf):
            return step
        self._at += 1
        await self._begin(steps[self._at])
        self.submitted, self._running = None, True
        text = f"The step was submitted. The next one:\n\n{steps[self._at].instruction.strip()}"
        return msgspec.structs.replace(
            step, observation=Observation(text, role=step.observation.role), terminated=False
        )

    async def grade(self) -> float | None:
        """Verify the last step that the agent worked on, and return the reward of the task.

        Raises:
            VerifierError: The tests wrote no valid reward.
        """
        if len(self._verdicts) == self._at:
            self._verdicts.append(await self._verify(is_last=True))
        rewards = [one.reward for one in self._verdicts]
        count = len(self._task.steps)
        rewards += [0.0] * (count - len(rewards))
        return rewards[-1] if self._task.reward == "final" else sum(rewards) / count

    async def close(self) -> None:
        """Release the sandbox."""
        try:
            await self._screen.close()
        finally:
            await super().close()

    def _use(self, mode: str) -> None:
        """Have the tools and the metrics of a mode."""
        if mode == "screen":
            load("pyte")  # an error of the first step would be too late
        tools: Mapping[str, Sequence[ToolFunction]] = {
            "bash": (bash, view_file, edit_file, submit),
            "screen": self._screen.tools,
            "script": (bash,),
        }
        self.use_tools(tools[mode])
        self._mode = mode
        metrics: Mapping[str, Fold] = {"action_is_valid": "mean"} if mode == "script" else ToolEnv.metrics
        self.metrics = metrics  # type: ignore[misc]  # those of the mode

    async def _begin(self, step: TaskStep) -> None:
        """Prepare the sandbox and the time limit for a step; the shell is a new one."""
        limit_s = self._used_s + (step.timeout_s or math.inf)
        self._limits = replace(self._limits, episode_timeout_s=min(self._episode_s, limit_s))
        if self._task.workdir:
            await self.sandbox.shell().run(f"cd -- {shlex.quote(self._task.workdir)}")
        if step.setup is not None:
            await self.sandbox.upload(step.setup, "/tmp/setup.sh")
            await _run_setup(self.sandbox, self._task, "/tmp/setup.sh")
        if step.healthcheck is not None:
            await _wait_until_healthy(self.sandbox, self._task, step.healthcheck)

    async def _verify(self, *, is_last: bool) -> Verdict:
        task, step = self._task, self._task.steps[self._at]
        await self._screen.close()
        if not (self._chosen.keep_processes and not step.verifier.is_separate):
            await end_processes(self.sandbox, task)
        for one in step.verifier.collect:
            await self.sandbox.exec(["sh", "-c", one.command], timeout_s=one.timeout_s, cwd=task.workdir or None)
        tests = self._tests[self._at] if self._tests else await clock.to_thread(pack_tests, step)
        if not step.verifier.is_separate:
            return await self._logged(await run_tests(self.sandbox, task, step, tests))
        artifacts = await pack(self.sandbox, task, step)
        if isinstance(artifacts, str):
            return await self._logged(Verdict(0.0, artifacts))
        spec = self._spec
        if step.verifier.image or step.verifier.dockerfile is not None:
            spec = replace(spec, image=await clock.to_thread(verifier_image_of, task, step))
        if is_last:
            await self.close()  # the verifier's sandbox needs its room
        return await self._logged(await verify(self.sandboxes, spec, task, step, artifacts, tests))

    async def _logged(self, verdict: Verdict) -> Verdict:
        """Keep what the tests printed, if the options name a folder for it."""
        if self._chosen.logs is not None:
            name = f"{self._task.name.replace('/', '-')}-{secrets.token_hex(4)}.txt"
            await clock.to_thread(_write, Path(self._chosen.logs, name), f"reward {verdict.reward:g}\n{verdict.log}\n")
        return verdict


def spec_of(task: TerminalTask, options: TerminalOptions) -> SandboxSpec:
    """Return the spec of the sandboxes of a task."""
    needs_image = options.image == OF_TASK or not task.is_portable
    return SandboxSpec(
        image=image_of(task) if needs_image else options.image,
        env=dict(task.env),
        cpus=task.cpus,
        memory_mib=task.memory_mib,
        disk_mib=task.disk_mib,
        pids=task.pids,
        network=task.network if options.network == "task" else "none",
        profile=task.profile,
        untrusted=task.profile == "strict" and (options.network == "none" or task.network != "open"),
    )


def _write(path: Path, text: str) -> None:
    path = path.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"logs: {path}: {error.strerror}; choose a folder that can be written") from None


def _introduction(mode: str, workdir: str) -> str:
    where = f" in {workdir}" if workdir else ""
    if mode == "script":
        return f"Answer with a shell script in a ```bash block. It runs once{where}, and must do the following."
    how = "with the tools" if mode == "bash" else "with the keys and the screen of a terminal"
    return f"Work on this task{where} {how}, and call submit when you are done."


def _how_to_build(options: TerminalOptions) -> str:
    folder = "" if options.tasks in (None, OWN) else f" --tasks {options.tasks}"
    return f"build its image with `envkit terminal build{folder}`, and add --backend docker"


def _level(task: TerminalTask) -> dict[str, JSON]:
    return {"difficulty": int(task.difficulty)} if task.difficulty.isdecimal() else {}


def _generated(options: TerminalOptions, seed: int) -> tuple[TerminalTask, Sequence[bytes], _Files]:
    """Return a generated task, the tests of its steps (see `pack_tests`), and the files of its environment.

    Its folder exists only during this call. Only a process that is killed in this call leaves it behind.
    """
    with TemporaryDirectory(prefix="envkit-task-") as scratch:
        task = options.task(seed, Path(scratch))
        paths = [path for path in task.environment.rglob("*") if path.is_file() and path.name not in _NOT_UPLOADED]
        files = {
            path.relative_to(task.environment).as_posix(): (path.read_bytes(), path.stat().st_mode & 0o777)
            for path in sorted(paths)
        }
        return task, [pack_tests(step) for step in task.steps], files


async def _prepare(sandbox: Sandbox, *, task: TerminalTask, files: _Files | None, how_to_build: str) -> None:
    """Write the environment of a portable task into a sandbox: `files`, or if it is None the files of its folder.

    Raises:
        SandboxRefusedError: A program is missing in the sandbox.
        SandboxError: The task's setup failed.
    """
    checks = [f"command -v {name} >/dev/null || echo {name}" for name in task.programs]
    missing = (await sandbox.exec(["sh", "-c", "; ".join(checks)])).stdout.split() if checks else []
    if missing:
        raise SandboxRefusedError(
            sandbox.id,
            f"{task.name} needs {', '.join(missing)} in the sandbox; install it on this machine (local), or use the "
            f"task's image: {how_to_build} --option image=task",
        )
    for path, (content, mode) in (files or {}).items():
        await sandbox.write(f"{WORK}/{path}", content, mode=mode)
    if files is None and task.environment.is_dir():
        await sandbox.upload(task.environment, WORK)
    await sandbox.exec(["rm", "-f", "--", *(f"{WORK}/{name}" for name in _NOT_UPLOADED)])
    if task.setup:
        await _run_setup(sandbox, task, f"{WORK}/{task.setup}")


async def _run_setup(sandbox: Sandbox, task: TerminalTask, path: str) -> None:
    cwd = task.workdir or None
    done = await sandbox.exec(["sh", "-c", 'sh "$0" && rm -f "$0"', path], cwd=cwd, timeout_s=_SETUP_S)
    if done.exit_code != 0:
        raise SandboxError(f"{task.name}: its setup failed: {cut_middle(done.stderr or done.stdout, 1000)}")


async def _wait_until_healthy(sandbox: Sandbox, task: TerminalTask, check: Healthcheck) -> None:
    """Run a healthcheck until it succeeds; what it starts in the background goes on.

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
