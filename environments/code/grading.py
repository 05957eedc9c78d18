"""Grading of a submission: its results for the hidden tests are computed in a fresh sandbox, and compared here.

The sandbox never holds an expected result: it gets the arguments, in random order, and returns results. A submission
that takes control of the program which calls it can therefore only earn the reward by computing the right results.
"""

from __future__ import annotations

import json
import operator
import random
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from envkit.protocols import Sandbox
from envkit.types import JSON, ExecResult

from ..tasks import Verdict
from .task_set import CodeOptions
from .tasks import Case, Problem, is_same, size

SOLUTION = "/workspace/solution.py"
"""Path of the submission, in the sandbox of a player and in that of the grader."""

_REQUEST = "/workspace/tests.json"
_DRIVER = Path(__file__).with_name("driver.py").read_text(encoding="utf-8")


async def judge(sandbox: Sandbox, problem: Problem, options: CodeOptions, source: bytes) -> Verdict:
    """Return the verdict on the program `source`, which runs in a new sandbox.

    The reward is 1.0 if it passes all hidden tests in time, otherwise 0.0; with ``options.partial``, the share of them.
    """
    tests = list(problem.tests)
    random.Random(secrets.randbits(64)).shuffle(tests)
    nonce = secrets.token_hex(16)
    arguments: list[JSON] = [list(test.arguments) for test in tests]
    request: JSON = {"nonce": nonce, "path": SOLUTION, "entry": problem.entry, "tests": arguments}
    await sandbox.write(SOLUTION, source)
    await sandbox.write(_REQUEST, json.dumps(request).encode())
    result = await sandbox.exec(
        ["python3", "-I", "-c", _DRIVER, _REQUEST],
        timeout_s=options.timeout_s,
        max_output_bytes=(1 << 20) + 2 * sum(size(test.expected) for test in tests),
    )
    if result.timed_out:
        return Verdict(reward=0.0, log="the tests did not end in time")
    passed = _passed(result, nonce, tests, _comparison(problem))
    reward = passed / len(tests) if options.partial else float(passed == len(tests))
    return Verdict(reward=reward, log=f"{passed} of {len(tests)} hidden tests passed")


def _comparison(problem: Problem) -> Callable[[JSON, JSON], bool]:
    """Return whether a result is right, as a function of the result and the expected one.

    Outputs of programs are compared as text, and results of generated problems with their types. Results of other
    functions are compared by ``==``, as the asserts of their rows do, so that 2.0 is 2.
    """
    if not problem.entry:
        return _is_same_text
    return is_same if problem.level else operator.eq


def _passed(result: ExecResult, nonce: str, tests: Sequence[Case], is_right: Callable[[JSON, JSON], bool]) -> int:
    """Return how many tests a submission passed, given what the driver wrote."""
    first, _, rest = result.stdout.partition(" ")
    content, _, last = rest.rpartition(" ")
    if result.exit_code != 0 or first != nonce or last != nonce:
        return 0
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return 0
    if not isinstance(found, list) or len(found) != len(tests):
        return 0
    pairs = zip(found, tests, strict=True)
    return sum(isinstance(one, list) and len(one) == 1 and is_right(one[0], test.expected) for one, test in pairs)


def _is_same_text(found: JSON, expected: JSON) -> bool:
    """Return whether two outputs are equal, apart from white space at the ends of lines and of the text."""
    lines = [[line.rstrip() for line in str(text).rstrip().split("\n")] for text in (found, expected)]
    return isinstance(found, str) and lines[0] == lines[1]
