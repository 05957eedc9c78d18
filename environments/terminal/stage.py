"""A step of a task, as `TaskEnv` plays it: its sandbox, its solution, the agent's artifacts, and its verification."""

from __future__ import annotations

import io
import re
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from envkit import clock
from envkit.errors import SandboxError, SandboxRefusedError
from envkit.protocols import Sandbox
from envkit.types import SandboxSpec

from ..tasks import Plan, SandboxTask, Verdict
from ..tools import cut_middle
from .artifacts import pack, unpack
from .images import image_of, verifier_image_of
from .options import OF_TASK, OWN, TerminalOptions
from .tasks import WORK, Artifact, TerminalTask
from .verifier import SETUP_S, VerifierError, end_processes, run_tests

BEGIN_S = 300.0
"""Maximum seconds of the setup of a task or step."""
_NOT_UPLOADED = ("Dockerfile", ".dockerignore")
_CHANGES_SHELL = re.compile(r"\b(exit|set|exec|trap|shopt|cd|return|BASH_SOURCE)\b|\$0")
_ARCHIVE = "/tmp/solution.tar.gz"


class TerminalStage(SandboxTask[Sequence[tuple[Artifact, bytes]]]):
    """A step of a task, mostly its only one. The agent's work consists of artifacts, as tar archives.

    Args:
        task: The task.
        options: Options of the environment.
    """

    later: Sequence[TerminalStage]

    def __init__(self, task: TerminalTask, options: TerminalOptions) -> None:
        self.name, self.task, self.options = task.name, task, options
        self.statement = f"{_introduction(options.mode, task.workdir)}\n\n{task.instruction.strip()}"
        needs_image = options.image == OF_TASK or not task.is_portable
        self.spec = SandboxSpec(
            image=image_of(task) if needs_image else options.image,  # reads the files of the image
            env=dict(task.env),
            cpus=task.cpus,
            memory_mib=task.memory_mib,
            disk_mib=task.disk_mib,
            network=task.network if options.network == "task" else "none",
            profile=task.profile,
            untrusted=task.profile == "strict" and (options.network == "none" or task.network != "open"),
        )
        self.later = [TerminalStage(one, options) for one in task.later]
        verifier = task.verifier
        moved_s = 2 * SETUP_S * (4 + len(task.artifacts))  # with and without the agent's work
        collected_s = sum(one.timeout_s for one in verifier.collect)
        setup_s = BEGIN_S if task.setup else 0.0
        self.judge_limit_s = moved_s + setup_s + collected_s + 2 * verifier.timeout_s
        # Most generated tasks are played only a few times, so a snapshot of each does not pay.
        self.prepared_key = task.folder if task.is_portable and task.scratch is None else None

    @property
    def judge_spec(self) -> SandboxSpec:
        verifier = self.task.verifier
        has_own = verifier.image or verifier.dockerfile is not None
        return replace(self.spec, image=verifier_image_of(self.task)) if has_own else self.spec

    @property
    def solution(self) -> Plan | None:
        return None if self.task.solution is None else _solve(self.task, self.task.solution)

    @property
    def cheats(self) -> Mapping[str, Plan]:
        return {
            name: Plan([f"bash -s <<'END-OF-CHEAT'\n{path.read_text()}\nEND-OF-CHEAT"])
            for name, path in self.task.cheats.items()
        }

    async def prepare(self, sandbox: Sandbox) -> None:
        """Write the environment of a portable task.

        Raises:
            SandboxRefusedError: A program is missing in the sandbox.
            SandboxError: The task's setup failed.
        """
        task = self.task
        if not task.is_portable:
            return
        checks = [f"command -v {name} >/dev/null || echo {name}" for name in task.programs]
        missing = (await sandbox.exec(["sh", "-c", "; ".join(checks)])).stdout.split() if checks else []
        if missing:
            raise SandboxRefusedError(
                sandbox.id,
                f"{task.name} needs {', '.join(missing)} in the sandbox; install it on this machine (local), or use "
                f"the task's image: {how_to_build(self.options)} --option image=task",
            )
        if task.environment.is_dir():
            await sandbox.upload(task.environment, WORK)
        await sandbox.exec(["rm", "-f", "--", *(f"{WORK}/{name}" for name in _NOT_UPLOADED)])
        if task.setup:
            await run_setup(sandbox, task, f"{WORK}/{task.setup}")

    async def collect(self, sandbox: Sandbox) -> Sequence[tuple[Artifact, bytes]] | Verdict:
        """End the agent's processes, and return the artifacts, or the verdict if tests run in the agent's sandbox."""
        verifier = self.task.verifier
        if not (self.options.keep_processes and not verifier.is_separate):
            await end_processes(sandbox, self.task)
        for one in verifier.collect:
            await sandbox.exec(["sh", "-c", one.command], timeout_s=one.timeout_s, cwd=self.task.workdir or None)
        if not verifier.is_separate:
            return await run_tests(sandbox, self.task)
        artifacts = await pack(sandbox, self.task)
        return Verdict(reward=0.0, log=artifacts) if isinstance(artifacts, str) else artifacts

    async def judge(self, sandbox: Sandbox, work: Sequence[tuple[Artifact, bytes]]) -> Verdict:
        """Unpack the artifacts and run the tests.

        Raises:
            VerifierError: The tests wrote no valid reward.
        """
        for artifact, archive in work:
            if (problem := await unpack(sandbox, self.task, artifact, archive)) is not None:
                return Verdict(reward=0.0, log=problem)
        return await run_tests(sandbox, self.task)

    async def judge_without_work(self, sandbox: Sandbox, error: VerifierError) -> Verdict:
        """Return a reward of 0 if the tests write a reward without the agent's work, which has thus caused `error`.

        Raises:
            VerifierError: They do not, so the task is broken.
        """
        if self.judge_spec == self.spec:
            await self.prepare(sandbox)
        await run_tests(sandbox, self.task)
        return Verdict(reward=0.0, log=f"{error}\nThe tests write a reward if the agent has done nothing.")

    async def located(self, sandbox: Sandbox) -> TerminalStage:
        """Return this task, with the image's working directory if the image decides about it."""
        if self.task.workdir:
            return self
        shown = await sandbox.exec(["sh", "-c", 'echo "$ENVKIT_WORKDIR"'], cwd="/")
        workdir = shown.stdout.strip()
        later = tuple(replace(one, workdir=workdir) for one in self.task.later)
        task = replace(self.task, workdir=workdir, later=later)
        return await clock.to_thread(TerminalStage, task, self.options)  # reads the files of the image


async def run_setup(sandbox: Sandbox, task: TerminalTask, path: str) -> None:
    """Run a script of the sandbox and remove it; a failure is a `SandboxError`."""
    command = ["sh", "-c", 'sh "$0" && rm -f "$0"', path]
    done = await sandbox.exec(command, cwd=task.workdir or None, timeout_s=BEGIN_S)
    if done.exit_code != 0:
        raise SandboxError(f"{task.name}: its setup failed: {cut_middle(done.stderr or done.stdout, 1000)}")


def how_to_build(options: TerminalOptions) -> str:
    folder = "" if options.tasks in (None, OWN) else f" --tasks {options.tasks}"
    return f"build its image with `envkit tasks Terminal-v0 build{folder}`, and add --backend docker"


def _introduction(mode: str, workdir: str) -> str:
    where = f" in {workdir}" if workdir else ""
    if mode == "script":
        return f"Answer with a shell script in a ```bash block. It runs once{where}, and must do the following."
    how = "with the tools" if mode == "bash" else "with the keys and the screen of a terminal"
    return f"Work on this task{where} {how}, and call submit when you are done."


def _solve(task: TerminalTask, solution: Path) -> Plan:
    """Return the plan that solves a task.

    If the solution is only a script, without commands that would end or change the agent's shell, it is the script.
    Otherwise the folder of the solution is copied into the sandbox, ``solve.sh`` runs, and the folder is removed. The
    folder is ``/solution`` where it can be made, as in Harbor, otherwise a folder in ``/tmp``.
    """
    script = (solution / "solve.sh").read_text(encoding="utf-8")
    if len(list(solution.iterdir())) == 1 and not task.solution_env and not _CHANGES_SHELL.search(script):
        return Plan([script.removeprefix("#!/bin/sh\n").removeprefix("#!/bin/bash\n").strip()])
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for path in sorted(solution.iterdir()):
            tar.add(path, path.name)
    env = " ".join(f"{name}={shlex.quote(value)}" for name, value in task.solution_env.items())
    command = (
        "S=/solution; mkdir -p $S 2>/dev/null || { S=/tmp/solution; mkdir -p $S; }; "
        f"tar -xzf {_ARCHIVE} -C $S --no-same-owner; rm {_ARCHIVE}; {env} bash $S/solve.sh; rm -rf $S"
    )
    return Plan([command], {_ARCHIVE: content.getvalue()})
