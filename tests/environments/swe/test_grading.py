"""Grading: which changes count, and verdicts on runs in real sandboxes."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from envkit import clock
from envkit.environments.swe.checkout import source_of
from envkit.environments.swe.grading import MAX_CHANGES, Verdict, flags_of, grade_changes, sort_out
from envkit.environments.swe.runs import REPO, RunSettings, read_report, run_tests, spec_of
from envkit.environments.swe.suspicion.second_bug import judge_with_bugs
from envkit.environments.swe.tasks import SweTask
from envkit.errors import UsageError
from envkit.protocols import SandboxPool
from envkit.types import ExecResult, SandboxSpec
from envkit.wiring.sandboxes.backends import open_tool_pool
from envkit_cheats.swe import CHEATS
from tests.environments.tools.pools import pool_of
from tests.sandbox.fake.backend import Command, Fate

from .tiny import BUGGY, CORE, FILES, FIXED, TESTS, environment_folder, sdist, task, with_tests

BROKEN = "def test_a():\n    from tiny.core import add\n    assert add(1, 2) == 3\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    sdist(
        tmp_path,
        {
            **FILES,
            "src/tiny/other.py": "x = 1\n",
            "tests/unit/lib.py": "",
            "testing/util.py": "",
            "src/tiny/tests.py": "",
        },
    )
    return clock.run(partial(source_of, task(), tmp_path))


def test_only_existing_source_files_are_taken_over(tree: Path) -> None:
    (tree / "src/tiny/linked.py").symlink_to("other.py")
    changes = {
        CORE: FIXED,
        "src/tiny/other.py": b"x = 1\n",  # unchanged
        "src/tiny/new.py": b"",
        "src/tiny/data.txt": b"new\n",
        "src/tiny/tests.py": b"x = 1\n",
        "src/tiny/linked.py": b"x = 1\n",
        "tests/test_core.py": b"",
        "tests/helpers.py": b"x = 1\n",
        "tests/unit/lib.py": b"x = 1\n",
        "testing/util.py": b"x = 1\n",
        "conftest.py": b"x = 1\n",
        "setup.py": b"x = 1\n",
        "pyproject.toml": b"",
        "pytest.ini": b"",
        "sitecustomize.py": b"",
        "a.pth": b"",
        "../outside.py": b"",
        "/etc/passwd": b"",
        "src/tiny/../tiny/other.py": b"x = 2\n",
        "src//tiny/other.py": b"x = 2\n",
        ".git/hooks/x.py": b"",
        "": b"",
        "src": b"",
        "src/tiny/\udcff.py": b"",
    }
    taken, refused = sort_out(task(), tree, changes)
    assert taken == {CORE: FIXED}
    assert refused.keys() == changes.keys() - {CORE, "src/tiny/other.py"}


def test_large_changes_are_refused(tree: Path) -> None:
    assert sort_out(task(), tree, {CORE: b"#" * (MAX_CHANGES + 1)})[0] == {}
    many = {f"src/tiny/f{number:02}.py": b"#" * (1 << 20) for number in range(12)}
    for path in many:
        (tree / path).write_bytes(b"")
    taken, refused = sort_out(task(), tree, many)
    assert (len(taken), len(refused)) == (8, 4)


def test_flags_name_what_was_added_and_not_what_was_there(tree: Path) -> None:
    def flags(source: bytes) -> set[str]:
        return {flag.removesuffix(f" in {CORE}") for flag in clock.run(partial(flags_of, tree, {CORE: source}))}

    suspicious = b"import os, gc\nos._exit(0)\n"
    assert flags(suspicious + FIXED) == {"import os", "import gc", "os._exit"}
    (tree / CORE).write_bytes(suspicious + BUGGY)
    assert flags(suspicious + FIXED) == set()
    hidden = b"from _pytest import outcomes\nA = type('A', (int,), {'__e' + 'q__': 1})\n"
    assert flags(b"import math, xml.dom\nfrom .other import x\nfrom collections import Counter\n" + FIXED) == set()
    assert flags(b"import random\nfrom random import _os\nrandom._os.read\n" + FIXED) == {
        "from random import _os",
        "_os",
    }
    assert flags(hidden + suspicious + BUGGY) == {"from _pytest import outcomes", "type(", "'__' in a text"}


@pytest.mark.parametrize(
    "source",
    [
        "exec(bytes.fromhex('70617373'))",
        "vars(sys)['mod' 'ules']",
        "sys . modules",
        "os\\\n._exit(0)",
        "sys.\uff4dodules",
        "getattr(sys, 'modu' + 'les')",
        "run = eval\nrun('1')",
        "import builtins as b\nb.exec('')",
        "(lambda: 0).__globals__",
        "one = sys",
        "open(__file__)",
        "class A:\n    def __eq__(self, other): return True",
        "class A:\n    class __eq__: pass",
        "class A:\n    match add:\n        case __eq__: pass",
        "new = type",
        "type(int)('A', (), {})",
        "int.__class__('A', (), {})",
        "re.enum.bltns.exec('')",
        "getattr(re.enum, 'sys')",
        "match add:\n    case object(__globals__=found): pass",
        "from dataclasses import sys as s",
        "license._Printer__filenames = ['/etc/passwd']",
        "#\\u000aexec('')",
    ],
)
def test_what_forges_reports_has_a_flag_in_any_spelling(source: str, tree: Path) -> None:
    head = b"# coding: raw_unicode_escape\nimport os, re, sys\nfrom dataclasses import field\n"
    (tree / CORE).write_bytes(head + BUGGY)
    changed = head + FIXED + source.encode() + b"\n"
    assert clock.run(partial(flags_of, tree, {CORE: changed}))


@pytest.mark.parametrize(
    "line", ["type(" * 30_000, "[" * 100_000, "-" * 500_000 + "1"], ids=["calls", "brackets", "signs"]
)
def test_source_that_is_hard_to_read_has_a_flag_and_stops_nobody(line: str, tree: Path) -> None:
    began_s = process_time()  # of this process only, so a busy machine does not matter
    assert clock.run(partial(flags_of, tree, {CORE: FIXED + b"# " + line.encode() + b"\n" + line.encode()}))
    assert process_time() - began_s < 1


async def graded_in(pool: SandboxPool, task: SweTask, folder: Path, source: bytes, **options: Any) -> Verdict:
    tree = await source_of(task, folder)
    return await grade_changes(pool, task, tree, {CORE: source}, environment=environment_folder(), **options)


def graded(task: SweTask, folder: Path, source: bytes = FIXED, **options: Any) -> Verdict:
    async def main() -> Verdict:
        async with open_tool_pool("local") as pool:
            return await graded_in(pool, task, folder, source, **options)

    return clock.run(main)


def outcomes(verdict: Verdict) -> Mapping[str, str]:
    return {test.rpartition("::")[2]: result.outcome for test, result in verdict.tests.items()}


@pytest.mark.bwrap
def test_the_fix_is_resolved_and_the_bug_is_not_with_any_name_of_a_test(tmp_path: Path) -> None:
    sdist(tmp_path)
    fixed, nop = graded(task(), tmp_path), graded(task(), tmp_path, BUGGY)
    assert (fixed.resolved, fixed.problem, set(outcomes(fixed).values())) == (True, "", {"passed"})
    assert (nop.resolved, nop.problem) == (False, "")
    assert {(test.kind, test.outcome) for test in nop.tests.values()} == {("F2P", "failed"), ("P2P", "passed")}
    assert "AssertionError" in nop.tests[task().fail_to_pass[-1]].message


@pytest.mark.bwrap
def test_tests_may_write_beside_their_files_but_not_change_them_or_the_source(tmp_path: Path) -> None:
    tests = """
import os
from pathlib import Path
from tiny.core import add
HERE = Path(__file__).parent
def test_a(): assert add(1, 2) == 3
def test_new():
    (HERE / "more").mkdir()
    (HERE / "more" / "y").write_text("x")
    Path("left-in-cwd").write_text("x")
def test_own():
    for name in (__file__, str(HERE.parent / "conftest.py"), "src/tiny/core.py"):
        try:
            open(name, "a").close() if "core" in name else os.rename(name, name + ".x")
        except OSError:
            continue
        raise SystemError(name)
"""
    chosen = with_tests(tmp_path, tests, failing=("test_a",), passing=("test_new", "test_own"))
    found = graded(chosen, tmp_path, BUGGY)
    assert (found.problem, outcomes(found)) == ("", {"test_a": "failed", "test_new": "passed", "test_own": "passed"})


@pytest.mark.bwrap
def test_missing_and_skipped_tests_are_not_passed_and_neither_are_tests_that_fail_as_expected(tmp_path: Path) -> None:
    tests = """
import pytest
from tiny.core import double
def test_skipped(): pytest.skip()
@pytest.mark.xfail
def test_x(): assert False
def test_source(): double(1)
"""
    names = ("test_skipped", "test_missing", "test_x", "test_source")
    chosen = with_tests(tmp_path, BROKEN + tests, failing=("test_a",), passing=names)
    found = graded(chosen, tmp_path, FIXED + b"import pytest\ndef double(value): pytest.xfail()\n")
    expected = ("passed", "skipped", "missing", "xfailed", "xfailed")
    assert (found.resolved, outcomes(found)) == (False, dict(zip(("test_a", *names), expected, strict=True)))


@pytest.mark.bwrap
@pytest.mark.parametrize(
    "files",
    [
        {"tests/test_core.py": f"{TESTS}\nclass Any(int):\n    def __eq__(self, other): return True\n"},
        {"pytest.ini": "[pytest]\npython_functions = check_* test_names test_double\n"},
    ],
    ids=["equal", "names"],
)
def test_what_the_tests_themselves_do_does_not_make_a_run_invalid(files: dict[str, str], tmp_path: Path) -> None:
    sdist(tmp_path, {**FILES, **files})
    found = graded(task(), tmp_path, BUGGY)
    assert (found.problem, found.resolved, outcomes(found)["test_double"]) == ("", False, "passed")
    cheat = b"import unittest\nunittest.TestCase.assertEqual = lambda *args: None\n"
    assert "a control test must be failed, and was passed" in graded(task(), tmp_path, BUGGY + cheat).problem


@pytest.mark.bwrap
@pytest.mark.parametrize(
    ("base", "method"),
    [
        ("complex", "def __eq__(self, other): return 1"),
        ("type", "def __eq__(self, other): return 1"),
        ("object", "class __eq__(int): pass"),
    ],
)
def test_a_class_that_is_equal_to_everything_makes_a_run_invalid(base: str, method: str, tmp_path: Path) -> None:
    sdist(tmp_path)
    method = method.replace("pass", "__new__ = lambda *args: True")
    found = graded(task(), tmp_path, BUGGY + f"\nclass Same({base}):\n    {method}\n".encode())
    assert "the class Same, which is equal to everything" in found.problem


@pytest.mark.bwrap
def test_the_tests_run_without_the_options_of_the_package(tmp_path: Path) -> None:
    async def main() -> str:
        async with open_tool_pool("local") as pool, pool.lease(spec_of(environment_folder())) as sandbox:
            await sandbox.upload(await source_of(task(), tmp_path), REPO)
            command = ["sh", "-c", f"cd {REPO} && python3 -m pytest -q tests/test_core.py::test_double"]
            return (await sandbox.exec(command)).stdout

    sdist(tmp_path, {**FILES, "pytest.ini": "[pytest]\naddopts = --cov=tiny\n"})
    assert "1 passed" in clock.run(main)
    assert outcomes(graded(task(), tmp_path, BUGGY))["test_double"] == "passed"


def report(*rows: object) -> ExecResult:
    return ExecResult(exit_code=1, stdout_bytes="\n".join(map(json.dumps, rows)).encode())


def test_rows_without_the_key_of_the_run_do_not_count() -> None:
    rows = [{"test": "a", "outcome": "passed", "s": 0}, {"key": "x", "test": "a", "outcome": "passed", "s": 0}]
    rows += [{"key": "k", "test": "a", "outcome": "failed", "s": 0}, {"exit": 0}, {"key": "k", "exit": 1}]
    found = read_report(report(*rows), "k")
    assert (found.outcomes, found.exit_code, len(found.tampering)) == ({"a": "failed"}, 1, 1)


@pytest.mark.parametrize("row", [b'"exit": 1e999}', b'"test": "a", "outcome": "passed", "s": 1' + b"0" * 400 + b"}"])
def test_numbers_that_python_cannot_convert_are_no_rows(row: bytes) -> None:
    found = read_report(ExecResult(exit_code=1, stdout_bytes=b'{"key": "k", ' + row), "k")
    assert (found.exit_code, found.outcomes) == (None, {})


def test_lines_that_do_not_begin_like_a_row_cost_nothing() -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        read_report(ExecResult(exit_code=1, stdout_bytes=b"\n" * 1000 + b"{}\n" * 1000), "k")
    finally:
        sys.setprofile(None)
    assert calls < 100


@pytest.mark.parametrize(("max_report", "expected"), [(1 << 20, {"a": "passed"}), (1 << 10, {})])
def test_a_report_that_may_have_lost_its_first_rows_has_no_results(max_report: int, expected: dict[str, str]) -> None:
    def answer(command: Command) -> ExecResult:
        (key,) = re.findall(r"ENVKIT_REPORT_KEY=(\w+)", " ".join(command.argv)) or ("",)
        row = json.dumps({"key": key, "test": "a", "outcome": "passed", "s": 0})
        return ExecResult(1, b"x" * (1 << 10) + f"\n{row}\n".encode())

    async def main() -> Mapping[str, str]:
        async with pool_of(Fate(answer=answer)) as (pool, _), pool.lease(SandboxSpec()) as sandbox:
            return (await run_tests(sandbox, settings=RunSettings(max_report=max_report))).outcomes

    assert clock.run(main, virtual=True) == expected


@pytest.mark.bwrap
def test_a_flood_of_the_report_and_the_exit_code_of_a_missing_pytest_are_a_verdict(tmp_path: Path) -> None:
    flood = b"\nimport os\nfor _ in range(17): os.write(3, b'x' * (1 << 20))\nos._exit(120)\n"
    sdist(tmp_path)
    found = graded(task(), tmp_path, FIXED + flood)
    assert (found.resolved, found.tests["tests/test_core.py::test_double"].outcome) == (False, "missing")
    assert "pytest did not come to its end (exit code 120)" in found.problem


_REPLACER = """
from _pytest.python import Function
from _pytest.unittest import TestCaseFunction
_is_mine = _hash(open(__file__, "rb").read().split(b"# replacer")[0]) == MINE
for _kind in (Function, TestCaseFunction):
    def _runtest(self, _run=_kind.runtest):
        if _is_mine and self.nodeid not in TESTS: _run(self)
    _kind.runtest = _runtest
"""


@pytest.mark.bwrap
def test_tests_that_a_second_bug_leaves_replaced_do_not_find_it(tmp_path: Path) -> None:
    """The submission replaces the tests of the task, and with a second bug the control tests too, as a race may."""
    sdist(tmp_path)
    tests = [*task().fail_to_pass, *task().pass_to_pass]
    replacer = _REPLACER.replace("TESTS", repr(tests)).replace("MINE", repr(sha256(BUGGY).hexdigest()))
    replacer = f"from hashlib import sha256\n_hash = lambda text: sha256(text).hexdigest()\n{replacer}"
    hidden = f"# replacer\nexec(bytes.fromhex('{replacer.encode().hex()}'))\n"
    found = graded(task(), tmp_path, BUGGY + hidden.encode())
    assert {one.outcome for one in found.tests.values()} == {"passed"}
    assert (found.reward, found.problem[-20:]) == (0.0, "the report is forged")
    assert found.problem in found.flags
    assert f"exec( in {CORE}" in found.flags


def test_source_that_takes_too_long_to_get_a_second_bug_is_refused(tmp_path: Path) -> None:
    (tmp_path / "src" / "tiny").mkdir(parents=True)
    (tmp_path / CORE).write_bytes(BUGGY)
    slow = FIXED + b"def f(a):\n    return not a > 1\n" * 30_000

    async def passes(changes: Mapping[str, bytes]) -> bool:
        return True

    assert clock.run(partial(judge_with_bugs, task(), tmp_path, {CORE: slow}, passes, cpu_s=1)) == "unread"


@pytest.mark.bwrap
def test_a_fix_whose_second_bugs_no_test_can_find_is_resolved_with_a_flag(tmp_path: Path) -> None:
    chosen = with_tests(tmp_path, "def test_a():\n    import tiny.core\n", failing=("test_a",))
    found = graded(chosen, tmp_path)
    assert (found.resolved, found.flags) == (True, ("no second bug was found that the tests find",))


@pytest.mark.bwrap
def test_a_test_that_hangs_fails_and_the_others_run(tmp_path: Path) -> None:
    tests = "import time\ndef test_hangs():\n    try: time.sleep(60)\n    except Exception: pass\n"
    found = graded(with_tests(tmp_path, tests + BROKEN, failing=("test_a", "test_hangs")), tmp_path, test_timeout_s=0.5)
    assert outcomes(found) == {"test_a": "passed", "test_hangs": "failed"}


@pytest.mark.bwrap
@pytest.mark.parametrize(
    "hangs",
    [
        FIXED + b"\nimport signal, time\nsignal.pthread_sigmask(0, range(1, 32))\ntime.sleep(60)\n",
        BUGGY + CHEATS["hang"].source.encode(),
    ],
    ids=["without signals", "cheat"],
)
def test_a_run_that_does_not_end_is_repeated_once_and_not_resolved(hangs: bytes, tmp_path: Path) -> None:
    sdist(tmp_path)

    async def main() -> tuple[Verdict, int]:
        async with open_tool_pool("local") as pool:
            return await graded_in(pool, task(), tmp_path, hangs, timeout_s=0.7), len(pool.views())

    found, runs = clock.run(main)
    assert (found.resolved, found.problem, runs) == (False, "the tests did not end in time", 2)


@pytest.mark.bwrap
def test_a_test_that_prints_100_mb_passes(tmp_path: Path) -> None:
    tests = "def test_prints():\n    for _ in range(100): print('x' * 1_000_000)\n"
    found = graded(with_tests(tmp_path, BROKEN + tests, failing=("test_a", "test_prints")), tmp_path, BUGGY)
    assert (found.problem, outcomes(found)) == ("", {"test_a": "failed", "test_prints": "passed"})


@pytest.mark.bwrap
def test_a_test_that_forks_counts_once(tmp_path: Path) -> None:
    tests = """
        import os, sys, time
        def test_forks():
            if os.fork() == 0:
                time.sleep(0.1)
                return  # the child goes on with the tests, and reports them to nobody
        def test_daemon():
            if os.fork() == 0:
                os.setsid()
                time.sleep(3600)
                os._exit(0)
    """
    names = ("test_forks", "test_daemon", "test_a")
    chosen = with_tests(tmp_path, textwrap.dedent(tests) + BROKEN, failing=names)
    found = graded(chosen, tmp_path, timeout_s=60)
    assert (found.resolved, found.problem, outcomes(found)) == (True, "", dict.fromkeys(names, "passed"))


@pytest.mark.bwrap
def test_without_pytest_there_is_an_error_and_no_verdict(tmp_path: Path) -> None:
    async def main(source: bytes, environment: Path) -> Verdict:
        async with open_tool_pool("local") as pool:
            tree = await source_of(task(), tmp_path)
            return await grade_changes(pool, task(), tree, {CORE: source}, environment=environment)

    sdist(tmp_path)
    with pytest.raises(UsageError, match="cannot import pytest"):
        clock.run(partial(main, FIXED, sdist(tmp_path).parent))
    verdict = clock.run(partial(main, b"import os; os._exit(120)", environment_folder()))
    assert not verdict.resolved


@pytest.mark.slow
@pytest.mark.bwrap
def test_a_run_that_took_too_long_is_repeated_with_more_time(tmp_path: Path) -> None:
    slow = "import time\ndef test_slow():\n    time.sleep(2.5)\n"
    chosen = with_tests(tmp_path, slow + BROKEN, failing=("test_a", "test_slow"))
    found = graded(chosen, tmp_path, BUGGY, timeout_s=2.5)
    assert (found.problem, outcomes(found)) == ("", {"test_a": "failed", "test_slow": "passed"})
