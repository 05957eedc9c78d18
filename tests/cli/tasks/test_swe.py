"""``envkit tasks SWE-v0``: what it prints, and what it answers to wrong arguments and tasks."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from envkit.environments.swe.env import OWN_TASKS
from envkit.environments.swe.tasks import read_folder
from envkit.wiring.data import folder_of
from tests.cli.commands import called, envkit

TASK = read_folder(OWN_TASKS)[0][0]


def swe(*words: str | Path, **env: Any) -> tuple[int, str, str]:
    return called("tasks", "SWE-v0", *words, **env)


def share_environments(data: Path) -> None:
    """Let builds with another data folder `data` use the installed packages in that of this machine."""
    ours = folder_of("swe") / "environments"
    ours.mkdir(parents=True, exist_ok=True)
    (data / "environments").symlink_to(ours)


def test_the_packages_are_listed_with_what_their_tests_need() -> None:
    code, output, _ = swe("packages")
    assert code == 0
    assert "marshmallow==4.4.0     simplejson==4.3.0" in output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("semver",), "'semver' must name an exact version"),
        (("pytest==9.2.0",), "pytest==9.2.0 cannot have bugs"),
        (("no-such-package==1.0",), "pip failed"),
        (("semver==3.1.1", "--backend", "moon"), "must be one of"),
    ],
)
def test_a_build_with_wrong_arguments_says_so(words: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    empty: dict[str, Any] = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_CONFIG_FILE": "/dev/null",
    }
    (tmp_path / "data" / "swe").mkdir(parents=True)
    share_environments(tmp_path / "data" / "swe")
    code, _, errors = called(
        "tasks", "SWE-v0", "build", *words, "--out", tmp_path, ENVKIT_DATA=str(tmp_path / "data"), **empty
    )
    assert code == 2
    assert problem in errors
    assert "Traceback" not in errors


@pytest.mark.bwrap
def test_a_package_without_tests_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data" / "swe"
    (data / "sdists").mkdir(parents=True)
    share_environments(data)
    (tmp_path / "empty-1.0").mkdir()
    (tmp_path / "empty-1.0" / "empty.py").write_text("x = 1\n")
    with tarfile.open(data / "sdists" / "empty-1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "empty-1.0", "empty-1.0")
    code, _, errors = called(
        "tasks", "SWE-v0", "build", "empty==1.0", "--out", tmp_path / "out", ENVKIT_DATA=str(data.parent)
    )
    assert code == 2
    assert "empty==1.0: no test of its source distribution passes here (pytest: " in errors


@pytest.mark.limits
def test_grade_prints_each_test_and_the_verdict() -> None:
    tests = len(TASK.fail_to_pass) + len(TASK.pass_to_pass)
    new = "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x = 1\n"
    code, output, _ = envkit("tasks", "SWE-v0", "grade", TASK.id, "-", stdin=TASK.patch + new)
    assert code == 0
    assert output.splitlines()[-2:] == [
        "refused: new.py: the file is new, and only files that exist can be changed",
        f"resolved: {tests} of {tests} tests pass",
    ]
    assert f"F2P   passed   {TASK.fail_to_pass[0]}" in output

    code, output, _ = swe("grade", TASK.id, "/dev/null")
    assert code == 1
    assert output.splitlines()[-1] == f"not resolved: {len(TASK.pass_to_pass)} of {tests} tests pass"


def test_grade_refuses_an_unknown_task_and_a_patch_that_does_not_exist() -> None:
    code, _, errors = swe("grade", TASK.id + "x", "/dev/null")
    assert (code, "did you mean" in errors) == (2, True)
    assert swe("grade", TASK.id, "missing.patch")[0] == 2


def test_a_folder_with_the_tasks_of_another_command_is_not_replaced(tmp_path: Path) -> None:
    shutil.copytree(OWN_TASKS, tmp_path / "tasks")
    code, _, errors = called(
        "tasks", "SWE-v0", "build", "own", "--want", "12", "--seed", "5", "--out", tmp_path / "tasks"
    )
    assert code == 2
    assert "has the tasks of another command, `envkit swe build own --want=12 --combine=3 --seed=1`" in errors


def test_a_folder_that_cannot_be_made_is_refused_before_the_build(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, errors = swe("build", "own", "--want", "1", "--out", tmp_path / "file" / "x")
    assert code == 2
    assert "file/x: Not a directory; choose a folder that can be written" in errors
