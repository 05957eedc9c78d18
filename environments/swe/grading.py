"""Grading: the changed source files of an agent are written into a fresh tree, and the package's own tests decide.

The tests run in a fresh sandbox, as the user ``grader``, who cannot change the tree. They share a process with the
changed source; so four more tests check the run: three must fail, and one must pass. Source that makes failed tests
look passed also changes the results of these four, or passes even with one more bug. See docs/swe.md for what this does
not protect against.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from subprocess import DEVNULL, PIPE
from typing import Literal

import anyio

from envkit.errors import UsageError
from envkit.protocols import Sandbox, SandboxPool

from ..tasks import Verdict as AnyVerdict
from ..tasks import in_fresh_sandbox
from .checkout import MAX_FILE, content_of, why_unsafe
from .runs import REPO, TEST_PATH, TEST_TIMEOUT_S, RunSettings, TestRun, run_tests, spec_of
from .suspicion.second_bug import CPU_S, MAX_BUGS, judge_with_bugs
from .tasks import SweTask

MAX_CHANGES = 8 << 20
"""Maximum bytes of all changed files together."""

_READ_DEADLINE_S = 20.0
"""Maximum seconds of the process that reads the source, because a hostile file may take any time to parse."""
_MAX_FLAGS = 100
_CONFIGURATION = re.compile(r"(setup|sitecustomize|usercustomize|noxfile|pytest)\.py")
_FINDS_NAMES = str(Path(__file__).with_name("suspicion") / "names.py")
_NO_PYTEST = 120
_BOOT = f"""
import sys
repo = [path for path in sys.path if path.startswith({REPO!r})]
sys.path[:] = [path for path in sys.path if path and path not in repo]
try:
    import pytest
except ImportError:
    sys.exit({_NO_PYTEST})
sys.path[:0] = repo
sys.argv = sys.argv[2:]
sys.exit(pytest.main())
"""
"""Program that imports pytest before modules of the package can take its place, and then runs ``-m pytest ...``."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """The result of a test that counts.

    Attributes:
        kind: ``F2P``: it fails with the bug; ``P2P``: it passes with and without it.
        outcome: ``passed``, ``failed``, ``error``, ``skipped``, ``xfailed``, or ``missing`` if it did not run.
        message: Why it did not pass.
    """

    kind: Literal["F2P", "P2P"]
    outcome: str
    message: str = ""

    @property
    def is_ok(self) -> bool:
        return self.outcome == "passed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(AnyVerdict):
    """The result of grading.

    Attributes:
        tests: Results by the id of the test.
        refused: Why changed files were refused, by path.
        flags: Why a person should look at the changes, such as ``os._exit in src/a.py``; not part of the verdict.
        problem: Why the run is not valid; empty if it is.
    """

    tests: Mapping[str, TestResult]
    refused: Mapping[str, str]
    flags: tuple[str, ...]
    problem: str

    @property
    def resolved(self) -> bool:
        """Whether the run is valid and all tests passed."""
        return self.reward == 1.0


async def grade_changes(
    sandboxes: SandboxPool,
    task: SweTask,
    tree: Path,
    changes: Mapping[str, bytes],
    *,
    environment: Path | None,
    image: str | None = None,
    timeout_s: float = 600.0,
    test_timeout_s: float = TEST_TIMEOUT_S,
) -> Verdict:
    """Return the verdict on changed files.

    A run that crashed is repeated once, and so is one that took too long, with three times the limit. If the run has
    signs of tampering, the tests also run without the changes, once per task and process; signs that also occur in that
    run do not count.

    `tree` is the folder with the task's source, see `source_of`; files that are not in `changes` are taken from it.
    `environment` is the folder of the tests' environment on this machine; None if `image` contains it. The maximum
    seconds are those of the whole run and of one test.

    Raises:
        SandboxLostError, SandboxStartError, CapacityError, ImpossibleSandboxError: See `in_fresh_sandbox`.
        UsageError: The sandbox has no pytest.
    """
    settings = RunSettings(
        timeout_s=timeout_s,
        test_timeout_s=test_timeout_s,
        user="grader",
        python=("-s", "-c", _BOOT),
        arguments=("--rootdir", REPO),
        max_report=(2 + len([*task.fail_to_pass, *task.pass_to_pass]) // 1000) << 20,
    )
    taken, refused = sort_out(task, tree, changes)
    flags = await flags_of(tree, taken)
    spec = spec_of(environment, image=image)

    key = (task.id, tree, environment, image)

    async def run_with(files: Mapping[str, bytes], sentinels: _Sentinels) -> TestRun | str:
        """Return a run, or why the submission ended its sandbox."""
        judge = partial(_run, task=task, tree=tree, taken=files, sentinels=sentinels, settings=settings)
        return await in_fresh_sandbox(sandboxes, spec, judge, ended="the tests ended the sandbox: {}".format)

    async def judged(
        files: Mapping[str, bytes], sentinels: _Sentinels
    ) -> tuple[TestRun | None, str, Mapping[str, TestResult]]:
        """Return a run, why it is not valid (empty if it is), and the results of the tests."""
        run = await run_with(files, sentinels)
        if isinstance(run, str):
            return None, run, _results(task, None)
        if run.tampering and not run.result.timed_out and key not in _KNOWN:
            clean = await run_with({}, sentinels) if files else run
            if not isinstance(clean, str) and clean.exit_code is not None and not clean.result.timed_out:
                _KNOWN[key] = frozenset(clean.tampering)
        return run, sentinels.problem_of(run, _KNOWN.get(key, frozenset())), _results(task, run)

    async def passes(files: Mapping[str, bytes]) -> bool:
        """Return whether no test finds a bug; a run whose control tests pass although they must fail finds none."""
        sentinels = _Sentinels(task, tree, tuple(files))
        run, why, results = await judged(files, sentinels)
        return sentinels.has_passed(run) or (not why and all(one.is_ok for one in results.values()))

    for _ in range(2):
        sentinels = _Sentinels(task, tree, tuple(taken))
        run, problem, tests = await judged(taken, sentinels)
        if run is None:
            continue
        if run.result.exit_code == _NO_PYTEST:  # or the source has exited with this code
            await in_fresh_sandbox(sandboxes, spec, _require_pytest, ended=str)
        if run.exit_code is not None and not run.result.timed_out:
            break
        if run.result.timed_out:
            settings = replace(settings, timeout_s=3 * timeout_s)
    if taken and not problem and all(test.is_ok for test in tests.values()):
        settings = replace(settings, timeout_s=timeout_s)
        second = await judge_with_bugs(task, tree, taken, passes)
        if second == "forged":
            problem = "the tests pass with a second bug, which they find in the known fix: the report is forged"
        if second == "unread":
            problem = f"no second bug can be chosen within {CPU_S} s of CPU time and 2 GiB"
        if second != "found":
            flags = (*flags, problem or "no second bug was found that the tests find")
    return Verdict(
        reward=float(not problem and all(test.is_ok for test in tests.values())),
        log="\n".join([*(f"{one.outcome}: {test}" for test, one in tests.items() if not one.is_ok), problem]),
        tests=tests,
        refused=refused,
        flags=flags,
        problem=problem,
    )


def grade_limit_s(timeout_s: float) -> float:
    """Return the maximum seconds of all runs of `grade_changes`, given the maximum of the first one."""
    return timeout_s * (1 + 3 + 1 + 2 * MAX_BUGS) + 60


async def flags_of(tree: Path, changes: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the new signs of an attempt to deceive the grader in changed Python files.

    The flags are found in the syntax trees of the files. If the search fails, a flag says so.
    """
    texts = {
        path: [content_of(tree, path).decode("latin-1"), content.decode("latin-1")]
        for path, content in sorted(changes.items())
        if len(content) <= MAX_FILE
    }
    if not texts:
        return ()
    found: list[str] | None = None
    with anyio.move_on_after(_READ_DEADLINE_S):
        command, given = [sys.executable, "-I", _FINDS_NAMES], json.dumps(texts).encode()
        done = await anyio.run_process(command, input=given, stdout=PIPE, stderr=DEVNULL, check=False)
        found = json.loads(done.stdout) if done.returncode == 0 else None
    if found is None:
        return (f"the changed files cannot be read within {_READ_DEADLINE_S:g} s and 2 GiB",)
    more = [f"{len(found) - _MAX_FLAGS} more"] if len(found) > _MAX_FLAGS else []
    return (*(one[:200] for one in found[:_MAX_FLAGS]), *more)


_KNOWN: dict[tuple[str, Path, Path | None, str | None], frozenset[str]] = {}
"""The signs of tampering in a run without changes, by task, tree, environment and image."""


def sort_out(task: SweTask, tree: Path, changes: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
    """Return the changed files that are accepted, and why each of the others is refused."""
    taken: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    total = 0
    for path, content in sorted(changes.items()):
        why = _why_refused(task, tree, path, content)
        if why is None and content_of(tree, path) == content:
            continue
        total += len(content)
        if why is None and total > MAX_CHANGES:
            why = f"all changes together are larger than {MAX_CHANGES} bytes"
        if why is None:
            taken[path] = content
        else:
            refused[path] = why
    return taken, refused


def _why_refused(task: SweTask, tree: Path, path: str, content: bytes) -> str | None:
    if (why := why_unsafe(tree, path)) is not None:
        return why
    pure = PurePosixPath(path)
    if pure.suffix != ".py":
        return "only Python source counts"
    is_test = TEST_PATH.search(path) and path != task.file
    if is_test or _CONFIGURATION.fullmatch(pure.name) or path in _files(task):
        return "it is a test, or configures tests"
    if not (tree / path).is_file():
        return "the file is new, and only files that exist can be changed"
    return f"the file is larger than {MAX_FILE} bytes" if len(content) > MAX_FILE else None


async def _require_pytest(sandbox: Sandbox) -> None:
    """Raise `UsageError` if a sandbox without the package has no pytest."""
    if (await sandbox.exec(["python3", "-s", "-c", _BOOT, "-m"], user="grader")).exit_code == _NO_PYTEST:
        raise UsageError("python3 cannot import pytest in the sandbox; check the environment of the tests")


async def _run(
    sandbox: Sandbox,
    *,
    task: SweTask,
    tree: Path,
    taken: Mapping[str, bytes],
    sentinels: _Sentinels,
    settings: RunSettings,
) -> TestRun:
    await sandbox.upload(tree, REPO)
    for path, content in taken.items():
        await sandbox.write(f"{REPO}/{path}", content)
    await sandbox.write(f"{REPO}/{sentinels.file}", sentinels.source.encode())
    # Tests may write beside their own files, but as another user they cannot change or replace a file that is there.
    await sandbox.exec(["find", REPO, "-type", "d", "-exec", "chmod", "1777", "{}", "+"])
    return await run_tests(sandbox, sorted({*_files(task), sentinels.file}), settings)


def _files(task: SweTask) -> frozenset[str]:
    """Return the files with the tests that count."""
    return frozenset(test.partition("::")[0] for test in (*task.fail_to_pass, *task.pass_to_pass))


def _results(task: SweTask, run: TestRun | None) -> Mapping[str, TestResult]:
    outcomes = {} if run is None else run.outcomes
    messages = {} if run is None else run.messages
    kinds: dict[str, Literal["F2P", "P2P"]] = {
        **dict.fromkeys(task.pass_to_pass, "P2P"),
        **dict.fromkeys(task.fail_to_pass, "F2P"),
    }
    return {
        test: TestResult(kind, outcomes.get(test, "missing"), messages.get(test, ""))
        for test, kind in sorted(kinds.items(), key=lambda item: (item[1], item[0]))
    }


class _Sentinels:
    """Tests in a file of their own: three must fail, one must pass. First the file imports the changed modules.

    The file is in the folder of the task's first test. Names are made of words in the names of the task's tests.
    """

    def __init__(self, task: SweTask, tree: Path, changed: tuple[str, ...]) -> None:
        functions = {
            re.sub(r"\[.*|.*::", "", test.partition("[")[0]) for test in (*task.fail_to_pass, *task.pass_to_pass)
        }
        words = sorted({word for name in functions for word in re.findall(r"[a-z]+", name)} - {"test"})
        names: list[str] = []
        folder = PurePosixPath(min(task.fail_to_pass).partition("::")[0]).parent
        while len(names) < 5:
            parts = [secrets.choice(words or ["value"]) for _ in range(2)]
            name = "_".join(["test", *parts, *([str(secrets.randbelow(100))] if secrets.randbelow(2) else [])])
            if name not in {*functions, *names} and not (tree / folder / f"{name}.py").exists():
                names.append(name)
        self.file = (folder / f"{names.pop()}.py").as_posix()
        value = repr(secrets.token_hex(5))
        bodies = {  # the last one must pass
            names[0]: f"assert {value} == ''",
            names[1]: f"unittest.TestCase().assertEqual({value}, '')",
            names[2]: f"with pytest.raises(ValueError): str({value})",
            names[3]: f"assert {value}",
        }
        self._expected = {f"{self.file}::{name}": "passed" if name == names[3] else "failed" for name in names}
        imports = [
            f"try:\n    import {name}\nexcept Exception:\n    pass\n"
            for name in map(module_of, changed)
            if name is not None
        ]
        # With __test__, pytest collects them whatever names its configuration asks for.
        tests = [f"def {name}():\n    {bodies[name]}\n{name}.__test__ = True\n" for name in sorted(names)]
        self.source = "\n".join(["import unittest\nimport pytest\n", *imports, *tests])

    def has_passed(self, run: TestRun | None) -> bool:
        """Return whether a test has passed that must fail, which no bug of the package can cause."""
        outcomes = {} if run is None else run.outcomes
        return any(must == "failed" and outcomes.get(test) == "passed" for test, must in self._expected.items())

    def problem_of(self, run: TestRun, known: frozenset[str]) -> str:
        """Return why a run is not valid; empty if it is. `known` are signs of tampering that do not count."""
        if run.result.timed_out:
            return "the tests did not end in time"
        if run.exit_code is None:
            last = run.result.stderr.strip().rpartition("\n")[2]
            return f"pytest did not come to its end (exit code {run.result.exit_code}): {last[:200]}"
        if tampering := [one for one in run.tampering if one not in known]:
            return f"the run was tampered with: {tampering[0]}"
        for test, outcome in self._expected.items():
            if run.outcomes.get(test) != outcome:
                return f"a control test must be {outcome}, and was {run.outcomes.get(test, 'missing')}"
        if (run.exit_code, run.result.exit_code) != (1, 1):
            return f"pytest ended with exit code {run.result.exit_code}, and must end with 1"
        return ""


def module_of(path: str) -> str | None:
    """Return the name under which tests import a source file; None if it is not a module to import."""
    name = re.sub(r"^(src|lib)/", "", path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parts = name.split(".")
    return name if all(part.isidentifier() for part in parts) and parts[-1] != "__main__" else None
