"""The submission in an answer, the comparison of results, and the order of calls."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from envkit import clock
from envkit.environments.code import Code, CodeOptions
from envkit.environments.code.env import submission_of
from envkit.environments.code.grading import judge
from envkit.environments.code.tasks import Case, Problem, is_same
from envkit.errors import OptionError, StepOrderError
from envkit.types import ExecResult, SandboxSpec
from tests.environments.tools.pools import pool_of
from tests.sandbox.fake.backend import Command, Fate

PROBLEM = Problem("Add one.", "solve", (), [Case((n,), n + 1) for n in range(4)], "", None, level=1)


@pytest.mark.parametrize(
    ("answer", "submission"),
    [
        ("x = 1", ("x = 1", False)),
        ("First\n```python\nx = 1\n```\nthen\n```python\nx = 2\n```\nand\n```\noutput\n```\n", ("x = 2\n", True)),
        ("```py\nx = 1", ("x = 1\n", True)),
        ("", ("", False)),
    ],
)
def test_the_last_block_of_python_is_the_submission(answer: str, submission: tuple[str, bool]) -> None:
    assert submission_of(answer) == submission


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (0, None, False),
        ("1", 1, False),
        ([1, [2.0]], [1, [2.0]], True),
        ([1, [2]], [1, [2.0]], False),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1, "b": 1}, {"a": 1}, False),
    ],
)
def test_values_are_the_same_if_their_types_are_too(found: Any, expected: Any, same: bool) -> None:
    assert is_same(found, expected) is same


def graded(fate: Fate, problem: Problem = PROBLEM, **options: Any) -> float:
    async def main() -> float:
        async with pool_of(fate) as (pool, _), pool.lease(SandboxSpec()) as sandbox:
            return (await judge(sandbox, problem, CodeOptions(**options), b"")).reward

    return clock.run(main, virtual=True)


@pytest.mark.parametrize(
    ("results", "exit_code", "partial", "expected"),
    [
        ("[[1], [2], [3], [4]]", 0, False, 1.0),
        ("[[1], [2], [3], [4]]", 1, False, 0.0),
        ("[[1], [2], [3], [4], [5]]", 0, False, 0.0),
        ("[[1], [2], [3], null]", 0, False, 0.0),
        ("[[1], [2], [3], null]", 0, True, 0.75),
        ("[[1], 2, [3.0], [4]]", 0, True, 0.5),
        ("[" * 100_000, 0, True, 0.0),
        ("1", 0, True, 0.0),
        ("", 0, True, 0.0),
    ],
)
def test_only_a_complete_report_of_right_results_earns_the_reward(
    monkeypatch: pytest.MonkeyPatch, results: str, exit_code: int, partial: bool, expected: float
) -> None:
    monkeypatch.setattr("envkit.environments.code.grading.secrets.token_hex", lambda size: "nonce")
    monkeypatch.setattr("envkit.environments.code.grading.random.Random.shuffle", lambda rng, tests: None)
    report = f"nonce {results} nonce".encode()
    assert graded(Fate(answer=lambda command: ExecResult(exit_code, report)), partial=partial) == expected
    assert graded(Fate(answer=lambda command: ExecResult(exit_code, report[:-1])), partial=partial) == 0.0


def test_results_for_a_row_of_a_file_are_compared_by_equality(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envkit.environments.code.grading.secrets.token_hex", lambda size: "nonce")
    row = Problem("", "f", (), [Case((), [2, {"a": True}])], "", None)

    def answer(report: bytes, command: Command) -> ExecResult:
        return ExecResult(0, report)

    for found, reward in (([2.0, {"a": 1}], 1.0), ([2.1, {"a": 1}], 0.0), ("[2, {'a': True}]", 0.0)):
        report = f"nonce {json.dumps([[found]])} nonce".encode()
        assert graded(Fate(answer=partial(answer, report)), row) == reward


def test_an_answer_ends_the_episode_and_a_second_one_is_refused() -> None:
    async def main() -> None:
        async with pool_of(Fate()) as (pool, _):
            env = Code(sandboxes=pool, level=1)
            with pytest.raises(StepOrderError):
                await env.step("")
            start = await env.reset(seed=0, options={"split": "eval"})
            assert (start.is_graded, start.tools, start.info) == (True, (), {"level": {"operations": 1}})
            assert start.grade_limit_s == 10 + 60  # of the tests, and to write them
            assert (await env.step("x")).terminated
            with pytest.raises(StepOrderError):
                await env.step("")
            with pytest.raises(OptionError, match=r"^mode: "):
                await env.reset(seed=0, options={"mode": json.dumps("tool")})

    clock.run(main, virtual=True)
