"""A task that is worked on in one sandbox and judged in another, which the agent has never seen."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from envkit.protocols import Sandbox
from envkit.types import SandboxSpec

from ..tools import read_files

WorkT = TypeVar("WorkT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge decided.

    Attributes:
        reward: Reward of the work.
        log: The end of what the judge printed, or why it did not run.
    """

    reward: float
    log: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions of a player that does not read observations: it writes files, then runs commands.

    Attributes:
        commands: Commands of bash, in one shell.
        files: Content of the files by path; a relative path begins in the folder of the shell.
    """

    commands: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)


class SandboxTask(Generic[WorkT]):
    """A task. A subclass defines `judge` and what else its task needs.

    Attributes:
        name: Name of the task.
        statement: What the agent is asked.
        spec: Spec of the agent's sandbox, and of the judge's unless `judge_spec` is overridden.
        prepared_key: All that the result of `prepare` depends on, if it should be kept as a snapshot for later
            episodes; None to prepare each sandbox.
        paths: Paths of the files that are the work, if `collect` is not overridden.
        judge_limit_s: Maximum seconds of what `collect` and `judge` run, by the task's own limits; None if there are
            none. The deadline of those who wait for the judge is never shorter, so that it does not pass first.
        later: Tasks that follow in the same episode and sandbox, after a submission each, if the environment goes on to
            them in its `step`, as Terminal does.
        modules: Names of modules that the agent must not find in its sandbox, besides those of envkit.
    """

    name: str = ""
    statement: str = ""
    spec: SandboxSpec = SandboxSpec()
    prepared_key: Hashable | None = None
    paths: Sequence[str] = ()
    judge_limit_s: float | None = None
    later: Sequence[SandboxTask[WorkT]] = ()
    modules: Sequence[str] = ()

    @property
    def judge_spec(self) -> SandboxSpec:
        """Spec of the judge's sandbox."""
        return self.spec

    @property
    def solution(self) -> Plan | None:
        """A plan that solves the task; None if no solution is known."""
        return None

    @property
    def cheats(self) -> Mapping[str, Plan]:
        """The task's own cheats by name: plans that must earn 0."""
        return {}

    @property
    def words(self) -> Mapping[str, str]:
        """Values of placeholders in the texts of cheats, replaced in this order."""
        return {}

    async def prepare(self, sandbox: Sandbox) -> None:
        """Write the files that the agent starts with."""

    async def collect(self, sandbox: Sandbox) -> WorkT | Verdict:
        """Return the agent's work, which `judge` gets; a verdict if it cannot be taken, which is the agent's fault.

        By default, the work is a mapping with the content of those files at `paths` that exist and that the agent can
        read, up to 16 MiB each.
        """
        return await read_files(sandbox, self.paths)  # type: ignore[return-value]

    async def judge(self, sandbox: Sandbox, work: WorkT) -> Verdict:
        """Return the verdict on the agent's work.

        Args:
            sandbox: A new sandbox with `judge_spec`.
            work: The agent's work. Do not trust it.
        """
        raise NotImplementedError(f"{type(self).__name__}.judge: define this method")

    def with_source(self, source: str) -> Plan:
        """Return the plan of a cheat that submits a text of source code."""
        raise NotImplementedError(f"{type(self).__name__}.with_source: define this method")

    def answer(self, plan: Plan, commands: Sequence[str]) -> str:
        """Return the answer of a language model that carries out a plan in an episode without tools.

        Args:
            plan: The plan.
            commands: Commands of bash that carry it out.
        """
        return "```bash\n{}\n```".format("\n".join(commands).rstrip())
