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

import msgspec

from envkit.env import AsyncEnv
from envkit.errors import StepOrderError
from envkit.protocols import SandboxPool
from envkit.types import JSON, Info, Observation, Options, Reset, Step

from ..answer import code_block
from ..options import override
from ..tools import ToolEnv
from .grading import SOLUTION, adaptive_timeout, grade
from .task_set import CodeOptions
from .tasks import Problem

_PYTHON = ("python", "py", "python3")


def submission_of(answer: str) -> tuple[str, bool]:
    """Return the program in a model's answer, and whether it is in a block of Python; see `code_block`."""
    return code_block(answer, _PYTHON)


class Code(AsyncEnv):
    """An environment with one programming problem per episode.

    Args:
        sandboxes: Leases the sandboxes of tools and graders.
        options: See `CodeOptions`; a task's options override single options for one episode.

    Raises:
        OptionError: An option is unknown or its value is invalid.
    """

    def __init__(self, *, sandboxes: SandboxPool, **options: JSON) -> None:
        self._sandboxes = sandboxes
        self._defaults = override(CodeOptions(), options)
        self._options = self._defaults
        self._problem: Problem | None = None
        self._workspace: _Workspace | None = None
        self._answer: str | None = None

    async def reset(self, *, seed: int, options: Options) -> Reset:
        await self.close()
        self._options = override(self._defaults, options)
        self._problem = problem = self._options.problem(seed)
        info: Info = {"level": {"operations": problem.level}} if problem.level else {}
        if self._options.mode == "answer":
            self.metrics = {"action_is_valid": "mean"}  # type: ignore[misc]  # those of the mode
            return Reset(Observation(_question(problem)), info, is_graded=True)
        self.metrics = ToolEnv.metrics  # type: ignore[misc]
        self._workspace = _Workspace(problem, self._options, self._sandboxes)
        start = await self._workspace.reset(seed=seed, options={})
        return msgspec.structs.replace(start, info={**start.info, **info})

    async def step(self, action: str) -> Step:
        if self._workspace is not None:
            return await self._workspace.step(action)
        if self._problem is None or self._answer is not None:
            raise StepOrderError("step before reset, or after the end of the episode")
        self._answer, is_valid = submission_of(action)
        return Step(Observation("Your answer was submitted."), 0.0, True, False, {"action_is_valid": is_valid})

    async def grade(self) -> float | None:
        """Run the hidden tests; see `envkit.environments.code.grading.grade`."""
        if self._workspace is not None:
            return await self._workspace.grade()
        if self._problem is None:
            raise StepOrderError("grade before reset")
        source = (self._answer or "").encode(errors="replace")
        return await _grade(self._sandboxes, self._problem, self._options, source)

    async def close(self) -> None:
        self._problem = self._answer = None
        if self._workspace is not None:
            await self._workspace.close()
        self._workspace = None


class _Workspace(ToolEnv):
    """The sandbox in which a player works on a problem in the mode ``"tools"``."""

    def __init__(self, problem: Problem, options: CodeOptions, sandboxes: SandboxPool) -> None:
        super().__init__(sandboxes=sandboxes, max_turns=options.max_turns)
        self.spec = options.spec
        self._problem = problem
        self._options = options

    async def start(self, seed: int, options: Options) -> str:
        await self.sandbox.write(SOLUTION, self._problem.stub.encode())
        await self.sandbox.write("/workspace/test_examples.py", _example_tests(self._problem).encode())
        return (
            f"{_statement(self._problem)}\n\nWrite it to {SOLUTION}, where a stub is. `python3 test_examples.py` in "
            "the same folder tests the examples. Call submit when you are done; hidden tests then decide."
        )

    async def grade(self) -> float | None:
        found = await self.submission(SOLUTION)
        await self.close()  # it must not hold the place that the grader's sandbox needs
        source = found.files.get(SOLUTION)
        return 0.0 if source is None else await _grade(self.sandboxes, self._problem, self._options, source)


async def _grade(sandboxes: SandboxPool, problem: Problem, options: CodeOptions, source: bytes) -> float | None:
    return await grade(
        sandboxes,
        problem,
        source,
        spec=options.spec,
        timeout=adaptive_timeout(options.timeout_s) if options.adaptive_timeout else options.timeout_s,
        case=f"level {problem.level}" if problem.level else problem.text,
        partial=options.partial,
    )


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
