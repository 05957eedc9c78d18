"""``envkit terminal``: what it prints and writes, and what it answers to wrong arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.environments.terminal import TerminalOptions
from envkit.environments.terminal.formats import read_task
from envkit.environments.terminal.images import image_of
from envkit.wiring import terminal
from tests.cli.commands import called
from tests.environments.terminal.formats.folders import harbor, portable, terminal_bench


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one task, in place of the tasks that envkit has."""
    task = portable(tmp_path / "own" / "sum")
    (task / "tests" / "harness.py").unlink()
    monkeypatch.setattr(terminal, "OWN_TASKS", tmp_path / "own")
    return tmp_path / "own"


def test_a_check_reports_each_task_and_fails_if_one_cannot_be_read(tmp_path: Path) -> None:
    harbor(tmp_path / "a")
    harbor(tmp_path / "b", "[environment]\ngpus = 1\n", {"tests/test.sh": "pip install pytest\n"})
    terminal_bench(tmp_path / "c", "instruction: x\nparser_name: other\n")

    code, output, _ = called("terminal", "check", tmp_path)

    assert code == 1
    assert output.splitlines() == [
        "a: ok",
        "b: ok, but:",
        "  environment.gpus: sandboxes of envkit have no accelerators",
        "  test.sh:1: needs the network at grading: pip install pytest",
        "c: cannot be read",
        f"  {tmp_path}/c/task.yaml: parser_name: envkit reads only summaries of pytest, got 'other'",
        "2 of 3 tasks can be read",
    ]


def test_a_check_of_tasks_that_can_be_read_succeeds(tmp_path: Path) -> None:
    assert called("terminal", "check", harbor(tmp_path / "a"))[:2] == (0, "a: ok\n1 of 1 tasks can be read\n")


def test_an_exported_task_has_the_harness_and_is_read_as_the_task(own: Path, tmp_path: Path) -> None:
    code, output, _ = called("terminal", "export", tmp_path / "out")
    task = read_task(tmp_path / "out" / "sum")

    assert (code, output) == (0, f"1 tasks in {tmp_path / 'out'}\n")
    assert (task.steps[0].verifier.tests / "harness.py").is_file()
    assert task.steps[0].instruction == read_task(own / "sum").steps[0].instruction


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("export", "OUT", "smu"), "there is no task 'smu'; did you mean 'sum'?"),
        (("export", "OUT", "--family", "none"), "there is no family 'none'"),
        (("export", "OUT", "--family", "x", "--seeds", "9:3"), "must be A:B with A < B"),
        (("export", "OUT", "sum", "--family", "x"), "'sum' is refused, since --family writes generated tasks"),
        (("export", "OUT", "--seeds", "0:3"), "--seeds and --difficulty need a family"),
        (("build", "other"), "there is no task 'other'; there are: sum\n"),
        (("build", "smu"), "there is no task 'smu'"),
        (("check", "OUT"), "does not exist"),
    ],
)
@pytest.mark.usefixtures("own")
def test_wrong_arguments_are_refused(words: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    code, _, errors = called("terminal", *(str(tmp_path / "out") if word == "OUT" else word for word in words))

    assert code == 2
    assert problem in errors


def test_the_images_of_all_generated_tasks_are_built() -> None:
    drawn = TerminalOptions(families="all", difficulty=[1, 5])

    built = {image_of(task) for task in terminal.family_tasks()}
    assert {image_of(drawn.task(seed)) for seed in range(60)} == built


def test_a_task_is_not_exported_over_a_folder(own: Path, tmp_path: Path) -> None:
    portable(own / "first")
    (tmp_path / "out" / "sum").mkdir(parents=True)
    code, _, errors = called("terminal", "export", tmp_path / "out")

    assert code == 2
    assert "exists already; choose another folder" in errors
    assert not (tmp_path / "out" / "first").exists()
