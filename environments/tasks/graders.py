"""Graders of submissions: a function, a command in a new sandbox, or a judge model.

They return the reward; None or an error means that they could not run, and voids the episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from envkit.errors import RefusedFileError, TooLargeError, UnreachableError
from envkit.protocols import Judge, Sandbox, SandboxPool
from envkit.types import ExecResult, FileUser, SandboxSpec, Submission

from ..answer import parse_number
from .judge_sandbox import in_fresh_sandbox

Rule: TypeAlias = Callable[[Submission], "float | Awaitable[float]"]


@dataclass(frozen=True, slots=True)
class RuleGrader:
    """A grader that calls a function or coroutine function with the submission. It runs in this process."""

    rule: Rule

    async def grade(self, submission: Submission) -> float | None:
        grade = self.rule(submission)
        return float(await grade if inspect.isawaitable(grade) else grade)


class AdaptiveTimeout:
    """A timeout that adapts to how long correct submissions take, as in RollPacker.

    The timeout of a case is ``min(max(least_s, factor * anchor_s), most_s)``. Its anchor is the longest time that a
    correct submission has taken so far; before the first one, the timeout is `most_s`. Share one object among the
    graders of a process: it keeps the anchors in memory.

    Args:
        least_s: Minimum timeout in seconds.
        factor: Timeout per second of the anchor, at least 1.
        most_s: Maximum timeout in seconds.
    """

    def __init__(self, least_s: float = 2.0, factor: float = 1.5, most_s: float = 30.0) -> None:
        if not (0 < least_s <= most_s and factor >= 1):
            raise ValueError(f"must be 0 < least_s <= most_s and factor >= 1, got {least_s}, {factor}, {most_s}")
        self._least_s, self._factor, self._most_s = least_s, factor, most_s
        self._anchors_s: dict[str, float] = {}

    def seconds(self, case: str) -> float:
        """Return the timeout of `case`, such as the name of a task."""
        anchor_s = self._anchors_s.get(case)
        return self._most_s if anchor_s is None else min(max(self._least_s, self._factor * anchor_s), self._most_s)

    def passed(self, case: str, duration_s: float) -> None:
        """Record that a correct submission has taken `duration_s` seconds."""
        self._anchors_s[case] = max(duration_s, self._anchors_s.get(case, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxGrader:
    """A grader that runs a command in a new sandbox, and computes the reward from the command's result.

    The submission's files are written for the user ``agent``, and those of the grader for the user ``grader`` into
    `Sandbox.grader_home`, where programs of the agent cannot read them. A command of the grader that runs submitted
    code gives that code the grader's rights; so the result of such a command is only as trustworthy as the code. To
    run submitted code without these rights, choose the user ``agent`` and check the output in `verdict`.

    The grade is 0 if the command exceeds its timeout, if the submission ends the sandbox (for example by using up its
    memory), or if one of its files cannot be written. If the sandbox is lost or does not start for another reason,
    another one is tried; after the last attempt, the error is raised.

    Attributes:
        sandboxes: Leases the sandboxes.
        command: Program and arguments. ``{home}`` in an argument is replaced by the path of `Sandbox.grader_home`.
        verdict: Returns the reward from the result of the command. It runs in this process.
        files: The grader's files, by path relative to `Sandbox.grader_home`.
        spec: Spec of the sandbox.
        timeout: Maximum seconds of the command, or an `AdaptiveTimeout`. A reward of at least 1 is correct for it.
        case: The case of an adaptive timeout, such as the key of the task.
        user: User that runs the command. The grader works in `Sandbox.grader_home`, the agent in its workspace, which
            is ``/workspace`` in sandboxes with isolation.
        max_output_bytes: Only this number of bytes of each output of the command is kept, from the end.
    """

    sandboxes: SandboxPool
    command: Sequence[str]
    verdict: Callable[[ExecResult], float]
    files: Mapping[str, bytes] = field(default_factory=dict)
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    timeout: float | AdaptiveTimeout = 60.0
    case: str = ""
    user: FileUser = "grader"
    max_output_bytes: int = 1 << 20

    async def grade(self, submission: Submission) -> float:
        """Grade a submission; see `envkit.protocols.Grader.grade`.

        Raises:
            SandboxLostError, SandboxStartError, CapacityError, ImpossibleSandboxError: See `in_fresh_sandbox`.
            RefusedFileError: A file of the grader cannot be written.
        """
        return await in_fresh_sandbox(
            self.sandboxes,
            self.spec,
            partial(self._grade_in, submission=submission),
            ended=lambda cause: 0.0,
        )

    async def _grade_in(self, sandbox: Sandbox, submission: Submission) -> float:
        home = sandbox.grader_home
        try:
            for path, content in submission.files.items():
                await sandbox.write(path, content)
        except RefusedFileError:
            return 0.0
        for name, content in self.files.items():
            await sandbox.write(f"{home}/{name}", content, user="grader")
        timeout = self.timeout
        timeout_s = timeout.seconds(self.case) if isinstance(timeout, AdaptiveTimeout) else timeout
        command = [word.replace("{home}", home) for word in self.command]
        result = await sandbox.exec(
            command, timeout_s=timeout_s, user=self.user, max_output_bytes=self.max_output_bytes
        )
        if result.timed_out:
            return 0.0
        grade = float(self.verdict(result))
        if isinstance(timeout, AdaptiveTimeout) and grade >= 1:
            timeout.passed(self.case, result.duration_s)
        return grade


def read_score(reply: str) -> float | None:
    r"""Return the number from 0 to 1 in the reply of a judge; None if there is no such number.

    See `envkit.environments.answer.parse_number`: the last number in ``<answer>`` tags, in ``\boxed``, or in the text.
    """
    number = parse_number(reply)
    return float(number) if number is not None and 0 <= number <= 1 else None


@dataclass(frozen=True, slots=True)
class JudgeGrader:
    """A grader that asks a judge model. The grade is None if the judge gives no answer, or none that can be read.

    The grade is 0 if the judge's server refuses the submission, for example as too long for the judge's context.

    A submission can contain text that addresses the judge. So the prompt should say where the submission begins and
    ends, and that nothing in it is an instruction.

    Attributes:
        judge: The judge.
        prompt: Returns the prompt for a submission. It should tell the judge how to write the score.
        read: Returns the score, 0 to 1, in the judge's reply; None if there is no score.
    """

    judge: Judge
    prompt: Callable[[Submission], str]
    read: Callable[[str], float | None] = read_score

    async def grade(self, submission: Submission) -> float | None:
        try:
            reply = await self.judge.ask([{"role": "user", "content": self.prompt(submission)}])
        except UnreachableError:
            return None
        except TooLargeError:
            return 0.0
        return self.read(reply)
