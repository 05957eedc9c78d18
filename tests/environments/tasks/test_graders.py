"""Graders: what grades a submission, what is the submission's fault, and what voids the episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.environments.tasks import AdaptiveTimeout, JudgeGrader, RuleGrader, SandboxGrader
from envkit.errors import TooLargeError, UnreachableError
from envkit.protocols import Grader
from envkit.sandbox import LocalBackend, Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.types import GRADER_HOME, ExecResult, SandboxSpec, Submission
from tests.environments.tools.pools import OUT_OF_MEMORY, pool_of
from tests.sandbox.fake.backend import FakeBackend, Fate

SUBMISSION = Submission("42", {"answer.py": b"print(6 * 7)"})
PASSES = Fate(answer=lambda command: ExecResult(0, b"42\n", duration_s=2))


def is_42(result: ExecResult) -> float:
    return float(result.stdout == "42\n")


def graded(*fates: Fate, **fields: Any) -> tuple[float | None, FakeBackend]:
    """Grade `SUBMISSION` with a grader that runs ``check``; return the grade, and the backend of the sandboxes."""

    async def main() -> tuple[float | None, FakeBackend]:
        async with pool_of(*fates) as (pool, backend):
            grader = SandboxGrader(sandboxes=pool, command=["check", "{home}/tests"], verdict=is_42, **fields)
            return await grader.grade(SUBMISSION), backend

    return clock.run(main, virtual=True)


def test_a_rule_is_a_function_or_a_coroutine_function() -> None:
    async def later(submission: Submission) -> float:
        return len(submission.text) / 2

    async def main() -> None:
        rules: Sequence[Grader] = (RuleGrader(lambda submission: submission.text == "42"), RuleGrader(later))
        assert [await rule.grade(SUBMISSION) for rule in rules] == [1.0, 1.0]

    anyio.run(main)


def test_a_sandbox_grader_writes_the_files_of_both_users_runs_the_command_as_grader_and_reads_the_result() -> None:
    grade, backend = graded(PASSES, files={"tests/a.py": b"assert True"}, spec=SandboxSpec(memory_mib=99))
    (sandbox,) = backend.sandboxes
    (command,) = sandbox.commands
    assert grade == 1.0
    assert sandbox.spec.memory_mib == 99
    assert sandbox.files[f"{GRADER_HOME}/tests/a.py"] == b"assert True"
    assert [content for path, content in sandbox.files.items() if path.endswith("/answer.py")] == [b"print(6 * 7)"]
    assert (command.argv, command.user) == (("check", f"{GRADER_HOME}/tests"), "grader")


@pytest.mark.parametrize(
    "fate",
    [
        Fate(answer=lambda command: ExecResult(0, b"42\n", duration_s=61)),
        Fate(dies_after_s=1, cause=OUT_OF_MEMORY, answer=PASSES.answer),
    ],
    ids=["timeout", "out of memory"],
)
def test_a_submission_that_exceeds_a_limit_has_the_grade_0_at_the_first_attempt(fate: Fate) -> None:
    grade, backend = graded(fate, PASSES)
    assert grade == 0.0
    assert len(backend.sandboxes) == 1


def test_an_adaptive_timeout_follows_the_longest_correct_submission_between_its_bounds() -> None:
    timeout = AdaptiveTimeout(least_s=2, factor=1.5, most_s=30)
    assert timeout.seconds("a") == 30
    seen = []
    for duration_s in (1, 8, 4, 25):
        timeout.passed("a", duration_s)
        seen.append(timeout.seconds("a"))
    assert seen == [2, 12, 12, 30]
    assert timeout.seconds("b") == 30


def test_a_sandbox_grader_adapts_its_timeout_to_correct_submissions_only() -> None:
    timeout = AdaptiveTimeout(least_s=1, factor=1.5, most_s=30)
    wrong = Fate(answer=lambda command: ExecResult(1, duration_s=9))
    slow = Fate(answer=lambda command: ExecResult(0, b"42\n", duration_s=3.1))
    assert [graded(fate, timeout=timeout, case="a")[0] for fate in (wrong, PASSES, slow)] == [0.0, 1.0, 0.0]
    assert timeout.seconds("a") == 3.0
    assert graded(slow, timeout=timeout, case="b")[0] == 1.0


@pytest.mark.parametrize("bounds", [(0, 1.5, 30), (31, 1.5, 30), (2, 0.5, 30)])
def test_bounds_that_exclude_each_other_are_refused(bounds: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="least_s <= most_s and factor >= 1"):
        AdaptiveTimeout(*bounds)


class ScriptedJudge:
    def __init__(self, reply: str | Exception) -> None:
        self.reply = reply
        self.asked: list[Mapping[str, str]] = []

    async def ask(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int = 512) -> str:
        self.asked += messages
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("Good, but slow: <answer>0.75</answer>", 0.75),
        ("The score is 1.", 1.0),
        ("Score: 7/10", 0.7),
        ("I give 3 of 5.", 0.6),
        ("80%", 0.8),
        ("Score: .8", 0.8),
        ("<answer>7</answer>", None),
        ("[[7]]", None),
        ("11/10", None),
        ("-0.5", None),
        ("0.7 or 0.8", None),
        ("0.7-0.8", None),
        ("1e-1x", None),
        ("It is excellent.", None),
        (UnreachableError("no answer"), None),
        (TooLargeError("the chat is too long for the judge"), 0.0),
    ],
)
def test_a_judge_grades_and_an_answer_that_cannot_be_read_voids(reply: str | Exception, grade: float | None) -> None:
    async def main() -> None:
        judge = ScriptedJudge(reply)
        grader: Grader = JudgeGrader(judge, lambda submission: f"Grade this: {submission.text}")
        assert await grader.grade(SUBMISSION) == grade
        assert judge.asked == [{"role": "user", "content": "Grade this: 42"}]

    anyio.run(main)


CHECK = """
import os, pathlib, subprocess, sys
found = subprocess.run([sys.executable, "-I", sys.argv[1]], capture_output=True, text=True)
print(os.getuid(), pathlib.Path(__file__).parent == pathlib.Path.cwd(), found.stdout.strip())
"""


@pytest.mark.limits  # without root, agent and grader are one user
@pytest.mark.bwrap
def test_a_real_sandbox_hides_the_files_of_the_grader_from_programs_of_the_agent() -> None:
    async def main() -> None:
        async with LocalBackend() as backend, Pool([Node("here", backend, Capacity(memory_mib=2048))]) as pool:
            seen: list[str] = []

            def verdict(result: ExecResult) -> float:
                seen.append(result.stdout.strip() + result.stderr)
                return 1.0

            submission = Submission(files={"answer.py": b"print(6 * 7)"})
            as_grader = SandboxGrader(
                sandboxes=pool,
                command=["python3", "-I", "{home}/check.py", "/workspace/answer.py"],
                files={"check.py": CHECK.encode()},
                verdict=verdict,
            )
            as_agent = SandboxGrader(
                sandboxes=pool,
                command=["cat", "answer.py", "{home}/check.py"],
                files={"check.py": b"secret"},
                verdict=verdict,
                user="agent",
            )
            assert await as_grader.grade(submission) == 1.0
            assert await as_agent.grade(submission) == 1.0
            assert seen[0] == "1001 True 42"
            assert seen[1].startswith("print(6 * 7)")
            assert "secret" not in seen[1]
            assert "Permission denied" in seen[1]

    anyio.run(main)
