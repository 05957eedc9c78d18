"""Code: write a Python function, in one answer or with tools in a sandbox. Hidden tests decide.

Observation  the problem with two examples; in the mode ``"tools"``, later the results of the tools
Actions      ``mode="answer"``: any text. The submission is its last block of Python, or the whole text if it has no
             block. ``mode="tools"``: calls of bash, view_file, edit_file and submit; the submission is the file
             ``/workspace/solution.py`` at the end of the episode
Reward       from the grader, after the last step: 1.0 if the submission passes all hidden tests, otherwise 0.0; with
             ``partial=True`` the share of tests that it passes
Ends         terminated after one answer, or after submit; truncated after ``max_turns`` actions
Problems     generated: a composition of ``level`` operations on numbers, strings and lists. Or from a file
Options      see `CodeOptions`
Info         ``action_is_valid``: whether the answer has a block of Python, or the action is a valid call
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import ClassVar

import msgspec

from envkit.errors import StepOrderError
from envkit.protocols import Sandbox
from envkit.types import Info, Observation, Options, Reset, Step

from ..answer import code_block
from ..tasks import Plan, SandboxTask, TaskEnv, Verdict
from ..tools import ToolEnv, read_files
from .grading import SOLUTION, judge
from .task_set import CodeOptions, options_of
from .tasks import Problem

_PYTHON = ("python", "py", "python3")
_WRITES_S = 60.0
"""Maximum seconds in which the judge writes its files, about."""


def submission_of(answer: str) -> tuple[str, bool]:
    """Return the program in a model's answer, and whether it is in a block of Python; see `code_block`."""
    return code_block(answer, _PYTHON)


class CodeTask(SandboxTask[bytes]):
    """A problem, whose solution is the file `SOLUTION`.

    Args:
        problem: The problem.
        options: Options of the environment.
    """

    def __init__(self, problem: Problem, options: CodeOptions) -> None:
        self.problem, self.options = problem, options
        self.spec = options.spec
        self.judge_limit_s = options.timeout_s + _WRITES_S
        self.statement = (
            f"{_statement(problem)}\n\nWrite it to {SOLUTION}, where a stub is. `python3 test_examples.py` in "
            "the same folder tests the examples. Call submit when you are done; hidden tests then decide."
        )

    @property
    def solution(self) -> Plan | None:
        if self.problem.solution is None:
            return None
        return Plan(["python3 test_examples.py"], self.with_source(self.problem.solution).files)

    @property
    def words(self) -> Mapping[str, str]:
        examples = [(list(case.arguments), case.expected) for case in self.problem.examples]
        return {"NAME": self.problem.entry.rpartition(".")[2] or "main", "EXAMPLES": repr(examples)}

    async def prepare(self, sandbox: Sandbox) -> None:
        await sandbox.write(SOLUTION, self.problem.stub.encode())
        await sandbox.write("/workspace/test_examples.py", _example_tests(self.problem).encode())

    async def collect(self, sandbox: Sandbox) -> bytes | Verdict:
        source = (await read_files(sandbox, [SOLUTION])).get(SOLUTION)
        return Verdict(reward=0.0, log=f"{SOLUTION} cannot be read") if source is None else source

    async def judge(self, sandbox: Sandbox, work: bytes) -> Verdict:
        """Run the hidden tests; see `envkit.environments.code.grading`."""
        return await judge(sandbox, self.problem, self.options, work)

    def with_source(self, source: str) -> Plan:
        return Plan(files={SOLUTION: f"{source.strip()}\n".encode()})

    def answer(self, plan: Plan, commands: Sequence[str]) -> str:
        source = plan.files.get(SOLUTION, b"").decode()
        if not source:
            loop = f"for command in {[*plan.commands]!r}:\n    subprocess.run(['bash', '-c', command])"
            source = f"import subprocess\n{loop}\n{self.problem.stub}"
        return f"```python\n{source.rstrip()}\n```"


class Code(TaskEnv):
    """An environment with one programming problem per episode. See `TaskEnv` for the arguments."""

    options: ClassVar[Options] = asdict(CodeOptions())
    max_turns = 20
    task: CodeTask
    _has_tools = True
    _answer: str | None = None
    """The answer of an episode without tools; None before it was given."""

    @classmethod
    def check_options(cls, options: Options) -> None:
        options_of(options)

    @classmethod
    def task_of(cls, seed: int, options: Options) -> CodeTask:
        chosen = options_of(options)
        return CodeTask(chosen.problem(seed), chosen)

    async def reset(self, *, seed: int, options: Options) -> Reset:
        """Start an episode; see `ToolEnv.reset`. In the mode ``"answer"``, it has no sandbox."""
        chosen = self._with(options)
        self._has_tools, self._answer = chosen["mode"] == "tools", None
        if self._has_tools:
            self.metrics = ToolEnv.metrics  # type: ignore[misc]  # those of the mode
            start = await super().reset(seed=seed, options=options)
        else:
            await self.close()
            self.metrics = {"action_is_valid": "mean"}  # type: ignore[misc]
            self.task = self.task_of(seed, chosen)
            self._running, self.sandbox_ended = True, None
            limit_s = self.task.judge_limit_s
            start = Reset(Observation(_question(self.task.problem)), {}, is_graded=True, grade_limit_s=limit_s)
        level = self.task.problem.level
        info: Info = {"level": {"operations": level}} if level else {}
        return msgspec.structs.replace(start, info={**start.info, **info})

    async def step(self, action: str) -> Step:
        if self._has_tools:
            return await super().step(action)
        if not self._running:
            raise StepOrderError("step before reset, or after the end of the episode")
        self._running = False
        self._answer, is_valid = submission_of(action)
        return Step(Observation("Your answer was submitted."), 0.0, True, False, {"action_is_valid": is_valid})

    async def work(self) -> bytes | Verdict:
        return await super().work() if self._has_tools else (self._answer or "").encode(errors="replace")


def _question(problem: Problem) -> str:
    what = "function" if problem.entry else "program"
    return f"{_statement(problem)}\n\nAnswer with the whole {what} in a ```python block."


def _statement(problem: Problem) -> str:
    """Return the problem's text with its examples."""
    if not problem.examples:
        return problem.text
    if problem.entry:
        shown = [f"{_call(problem.entry, case.arguments)} == {case.expected!r}" for case in problem.examples]
        return "\n".join([problem.text, "", "Examples:", *shown])
    shown = [f"Input:\n{case.arguments[0]}\nOutput:\n{case.expected}" for case in problem.examples]
    return "\n\n".join([problem.text, *shown])


def _call(entry: str, arguments: object) -> str:
    values = ", ".join(map(repr, arguments)) if isinstance(arguments, (list, tuple)) else ""
    return f"{entry.replace('.', '().')}({values})"


def _example_tests(problem: Problem) -> str:
    """Return a program that tests the examples."""
    cases = [(list(case.arguments), case.expected) for case in problem.examples]
    if problem.entry:
        load, found = "import solution", f"solution.{problem.entry.replace('.', '().')}(*given)"
    else:
        run = '[sys.executable, "solution.py"], input=given[0], stdout=subprocess.PIPE, text=True'
        cases = [(given, str(expected).rstrip()) for given, expected in cases]
        load, found = "import subprocess, sys", f"subprocess.run({run}).stdout.rstrip()"
    return f"""{load}

for given, expected in {cases!r}:
    found = {found}
    assert found == expected, (given, found, expected)
print("the examples pass")
"""
