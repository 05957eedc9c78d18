"""Rows of other data sets as tasks. The rows are written by hand, with the columns of each set."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from envkit.environments.swe.formats import read_tasks, write_folder_of
from envkit.environments.swe.formats.diffs import reverse
from envkit.environments.swe.packages import OWN, PYTEST, sha256_of
from envkit.environments.swe.tasks import TIMEOUT_S, Lock, LockedPackage, SweTask, read_folder, write_folder
from envkit.errors import ConfigError, EnvkitError, UsageError
from tests.cli.commands import called

FIX = "--- a/pkg/core.py\n+++ b/pkg/core.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
TESTS = "--- a/tests/test_core.py\n+++ b/tests/test_core.py\n@@ -1 +1,2 @@\n import pkg\n+assert pkg\n"
FAILING = ["tests/test_core.py::test_add[1 2-3]"]
PASSING = ["tests/test_core.py::test_name", "tests/test_core.py::test_cut[a"]

SWE_BENCH: dict[str, Any] = {
    "repo": "Psf/pkg",
    "instance_id": "Psf__pkg-17",
    "base_commit": "c0ffee",
    "patch": FIX,
    "test_patch": TESTS,
    "problem_statement": "add subtracts",
    "hints_text": "look at core",
    "created_at": "2024-01-01T00:00:00Z",
    "version": "1.0",
    "FAIL_TO_PASS": json.dumps(FAILING),
    "PASS_TO_PASS": json.dumps(PASSING),
    "environment_setup_commit": "decade",
}
SWE_GYM = {
    **{key: value for key, value in SWE_BENCH.items() if key != "environment_setup_commit"},
    "FAIL_TO_PASS": FAILING,
    "PASS_TO_PASS": PASSING,
}
SWE_SMITH: dict[str, Any] = {
    "instance_id": "psf__pkg.c0ffee12.func_basic__abc",
    "repo": "swesmith/psf__pkg.c0ffee12",
    "patch": reverse(FIX),
    "FAIL_TO_PASS": FAILING,
    "PASS_TO_PASS": PASSING,
    "image_name": "swesmith.x86_64.psf__pkg.c0ffee12",
    "problem_statement": "",
}
LOG = """\
=== 1 failed ===
=========================== short test summary info ============================
PASSED r2e_tests/test_1.py::TestAdd::test_name
{outcome} r2e_tests/test_1.py::TestAdd::test_add[a b] - assert 1 == 3
FAILED r2e_tests/test_1.py::test_other
SKIPPED [1] r2e_tests/test_1.py:3: no
"""
R2E: dict[str, Any] = {
    "repo_name": "pkg",
    "docker_image": "namanjain12/pkg_final:c0ffee",
    "commit_hash": "c0ffee",
    "parsed_commit_content": json.dumps(
        {
            "old_commit_hash": "decade",
            "new_commit_hash": "c0ffee",
            "file_diffs": [
                {
                    "header": {"file": {"path": "pkg/core.py"}},
                    "old_file_content": "def add(a, b):\n    return a - b\n",
                    "new_file_content": "def add(a, b):\n    return a + b\n",
                },
                {
                    "header": {"file": {"path": "tests/test_core.py"}},
                    "old_file_content": "",
                    "new_file_content": "import pkg\n",
                },
            ],
        }
    ),
    "execution_result_content": json.dumps(
        {
            "test_file_names": ["test_1.py"],
            "test_file_codes": ["import pkg\n"],
            "old_commit_res_stdout": LOG.format(outcome="FAILED"),
            "new_commit_res_stdout": LOG.format(outcome="PASSED").replace(" - assert 1 == 3", ""),
        }
    ),
    "expected_output_json": json.dumps(
        {"TestAdd.test_name": "PASSED", "\x1b[1mTestAdd.test_add[a b]\x1b[0m": "PASSED", "test_other - oh": "FAILED"}
    ),
    "problem_statement": "Write an issue.\n[ISSUE]\nadd subtracts\n[/ISSUE]\n",
    "prompt": "the fix is +",
}
OURS: dict[str, Any] = {
    "instance_id": "pkg-1.0.flip.0",
    "repo": "pkg-1.0",
    "base": "pkg-1.0.tar.gz",
    "bug_patch": reverse(FIX),
    "patch": FIX,
    "strategy": "flip",
    "function": "add",
    "file": "pkg/core.py",
    "FAIL_TO_PASS": FAILING,
    "PASS_TO_PASS": PASSING,
    "validate_seconds": 1.5,
}


def written(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(tmp_path: Path, row: dict[str, Any]) -> SweTask:
    (task,) = read_tasks(written(tmp_path, row))
    return task


def test_a_row_of_swe_bench_has_its_tests_as_json_and_an_image_by_rule(tmp_path: Path) -> None:
    assert read(tmp_path, SWE_BENCH) == SweTask(
        id="Psf__pkg-17",
        repo="Psf/pkg",
        image="swebench/sweb.eval.x86_64.psf_1776_pkg-17:latest",
        patch=FIX,
        test_patch=TESTS,
        fail_to_pass=tuple(FAILING),
        pass_to_pass=tuple(PASSING),
        statements=("add subtracts",),
    )
    assert read(tmp_path, {**SWE_BENCH, "docker_image": "mine/pkg:1"}).image == "mine/pkg:1"


def test_a_row_of_swe_gym_has_its_tests_as_lists_and_another_image(tmp_path: Path) -> None:
    task = read(tmp_path, SWE_GYM)
    assert task.image == "xingyaoww/sweb.eval.x86_64.psf_s_pkg-17:latest"
    assert (task.fail_to_pass, task.pass_to_pass) == (tuple(FAILING), tuple(PASSING))


def test_the_patch_of_a_row_of_swe_smith_is_the_bug_and_its_reverse_the_fix(tmp_path: Path) -> None:
    task = read(tmp_path, SWE_SMITH)
    assert (task.bug_patch, task.patch, task.test_patch) == (reverse(FIX), FIX, "")
    assert task.image == "jyangballin/swesmith.x86_64.psf_1776_pkg.c0ffee12:latest"
    assert FAILING[0] in task.statements[0]
    assert read(tmp_path, {**SWE_SMITH, "image_name": "swebench/smith.x"}).image == "swebench/smith.x:latest"


def test_a_row_of_r2e_gym_gets_its_tests_from_the_outputs_before_and_after_the_fix(tmp_path: Path) -> None:
    task = read(tmp_path, R2E)
    assert task.fail_to_pass == ("r2e_tests/test_1.py::TestAdd::test_add[a b]",)
    assert task.pass_to_pass == ("r2e_tests/test_1.py::TestAdd::test_name",)
    assert (task.id, task.image) == ("pkg_final.c0ffee", "namanjain12/pkg_final:c0ffee")
    assert task.statements == ("add subtracts",)
    assert task.patch.endswith(FIX)
    assert "test_core" not in task.patch
    assert "+++ b/r2e_tests/test_1.py\n@@ -0,0 +1 @@\n+import pkg\n" in task.test_patch


def test_a_reference_row_has_its_source_in_an_sdist(tmp_path: Path) -> None:
    task = read(tmp_path, OURS)
    assert (task.base, task.image, task.bug_patch, task.patch) == ("pkg-1.0.tar.gz", "", reverse(FIX), FIX)
    assert (task.file, task.function, task.strategy) == ("pkg/core.py", "add", "flip")
    assert task.statements[0].startswith("`add` in `pkg/core.py` has a bug.")


def test_rows_are_read_from_lines_gzip_and_a_list(tmp_path: Path) -> None:
    lines = written(tmp_path, SWE_BENCH, SWE_SMITH)
    expected = read_tasks(lines)
    packed, listed = tmp_path / "rows.jsonl.gz", tmp_path / "rows.json"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    listed.write_text(json.dumps([SWE_BENCH, SWE_SMITH], indent=1))
    assert read_tasks(packed) == read_tasks(listed) == expected
    assert len(expected) == 2


def test_rows_are_read_from_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    file = tmp_path / "rows.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([SWE_GYM]), file)
    assert list(read_tasks(file)) == [read(tmp_path, SWE_GYM)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"x": 1}, "rows.jsonl: row 2: is not a row of SWE-bench"),
        ({**SWE_BENCH, "PASS_TO_PASS": "[oops"}, r"row 2: PASS_TO_PASS: must be JSON, got \"\[oops\""),
        ({**SWE_GYM, "FAIL_TO_PASS": []}, "row 2: no test fails before the fix"),
        ({**SWE_GYM, "patch": None}, "row 2: patch: must be a text, but is missing"),
        ({**SWE_SMITH, "patch": "GIT binary patch\n"}, "row 2: patch: the diff cannot be reversed"),
        ({**R2E, "parsed_commit_content": '{"file_diffs": [{}]}'}, "row 2: parsed_commit_content: has a malformed"),
    ],
)
def test_errors_name_file_row_and_column(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    file = written(tmp_path, SWE_BENCH, row)
    with pytest.raises(ConfigError, match=message):
        read_tasks(file, strict=True)
    assert [task.id for task in read_tasks(file)] == [SWE_BENCH["instance_id"]]


def test_rows_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**SWE_BENCH, "instance_id": name} for name in ("a", "b", "a", "../../c")]
    file = written(tmp_path, *rows, {**SWE_GYM, "FAIL_TO_PASS": []})
    assert [task.id for task in read_tasks(file)] == ["a", "b"]
    (line,) = caplog.messages
    assert line == (
        "left out 3 of 5 rows, which cannot be used; "
        f"to list them: envkit tasks SWE-v0 import --strict {file} --out DIR"
    )
    code, _, errors = called("tasks", "SWE-v0", "import", "--strict", file, "--out", tmp_path / "tasks")
    assert code == 2
    assert [problem.partition("row ")[2][:10] for problem in errors.splitlines()] == [
        "3: the id ",
        "4: the id ",
        "5: no test",
    ]
    assert not (tmp_path / "tasks").exists()


def test_an_id_of_a_folder_of_others_is_no_path(tmp_path: Path) -> None:
    write_folder(tmp_path, [], Lock(command="", environment=(), packages=()))
    task = {"id": "../../x", "repo": "r", "fail_to_pass": ["t"], "statements": ["s"]}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    with pytest.raises(
        ConfigError,
        match=r"tasks.jsonl:1: the id must be 1 to 200 .* got '\.\./\.\./x'",
    ):
        read_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{oops", '["text"]', "[oops"])
def test_a_file_without_rows_is_an_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "rows"
    file.write_text(content)
    with pytest.raises(EnvkitError, match=r"rows"):
        read_tasks(file)
    with pytest.raises(UsageError, match="cannot read"):
        read_tasks(tmp_path / "missing")


def test_a_folder_of_imported_tasks_is_one_of_the_environment(tmp_path: Path) -> None:
    ours = {**OURS, "base": "envkit-intervals-1.0.tar.gz"}
    data, folder = tmp_path / "data", tmp_path / "tasks"
    tasks = write_folder_of(written(tmp_path, ours, SWE_GYM), folder, data=data, command="rows")
    found, lock = read_folder(folder)
    assert list(found) == tasks
    (package,) = lock.packages
    assert (lock.environment, package.requirement) == (tuple(sorted(PYTEST)), OWN)
    assert package.sha256 == sha256_of(data / "sdists" / package.base)
    timed = LockedPackage(requirement="", base="a-1.0.tar.gz", sha256="", licence="", tests=1, suite_s=10.0)
    lock = msgspec.structs.replace(lock, packages=(package, timed))
    assert (lock.timeout_s(package.base), lock.timeout_s(timed.base)) == (TIMEOUT_S, 60.0)


def test_the_command_line_imports_tasks_and_says_which_need_an_image(tmp_path: Path) -> None:
    rows = written(tmp_path, SWE_GYM, {**OURS, "base": "envkit-intervals-1.0.tar.gz"})
    words = ("tasks", "SWE-v0", "import", rows, "--out", tmp_path / "tasks")
    code, output, _ = called(*words, ENVKIT_DATA=str(tmp_path))
    assert code == 0
    assert output.startswith(f"2 tasks in {tmp_path / 'tasks'}\n1 of them needs an image")
    assert [task.id for task in read_folder(tmp_path / "tasks")[0]] == ["Psf__pkg-17", "pkg-1.0.flip.0"]
