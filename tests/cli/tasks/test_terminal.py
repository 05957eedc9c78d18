"""``envkit tasks Terminal-v0``: what it prints and writes, and what it answers to wrong arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.environments.terminal import TerminalOptions, commands
from envkit.environments.terminal.formats import read_task
from envkit.environments.terminal.images import image_of
from tests.cli.commands import called
from tests.environments.terminal.formats.folders import harbor, portable, terminal_bench


def terminal(*words: str | Path) -> tuple[int, str, str]:
    return called("tasks", "Terminal-v0", *words)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one task, in place of the tasks that envkit has."""
    task = portable(tmp_path / "own" / "sum")
    (task / "tests" / "harness.py").unlink()
    monkeypatch.setattr(commands, "OWN_TASKS", tmp_path / "own")
    return tmp_path / "own"


def test_the_list_of_a_folder_has_what_is_not_supported_and_fails_if_a_task_cannot_be_read(tmp_path: Path) -> None:
    harbor(tmp_path / "a")
    assert terminal("ls", tmp_path)[0] == 0
    harbor(tmp_path / "b", "[environment]\ngpus = 1\n")
    terminal_bench(tmp_path / "c", "instruction: x\nparser_name: other\n")
    (tmp_path / "d").mkdir()

    code, output, _ = terminal("ls", tmp_path)

    assert code == 1
    assert [line.partition(" [Errno")[0] for line in output.splitlines()] == [
        "TASK  DIFFICULTY  PROFILE  PROGRAMS",
        "a     -           system   -",
        "b     -           system   -",
        "b: environment.gpus: sandboxes of envkit have no accelerators",
        f"c: cannot be read: {tmp_path}/c/task.yaml: parser_name: envkit reads only summaries of pytest, got 'other'",
        f"d: cannot be read: {tmp_path}/d/task.toml: cannot be read:",
        "2 of 4 tasks can be read",
    ]


def test_an_exported_task_has_the_harness_and_is_read_as_the_task(own: Path, tmp_path: Path) -> None:
    code, output, _ = terminal("export", tmp_path / "out")
    task = read_task(tmp_path / "out" / "sum")

    assert (code, output) == (0, f"1 task in {tmp_path / 'out'}\n")
    assert (task.verifier.tests / "harness.py").is_file()
    assert task.instruction == read_task(own / "sum").instruction


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("export", "OUT", "smu"), "there is no task 'smu'; did you mean 'sum'?"),
        (("export", "OUT", "--family", "none"), "there is no family 'none'"),
        (("export", "OUT", "--family", "x", "--seeds", "9:3"), "must be A:B with A < B"),
        (("export", "OUT", "sum", "--family", "x"), "'sum': a task cannot be named with --family"),
        (("export", "OUT", "--seeds", "0:3"), "--seeds and --difficulty need a family"),
        (("build", "other"), "there is no task 'other'; there are: sum\n"),
        (("build", "smu"), "there is no task 'smu'"),
        (("ls", "OUT"), "does not exist"),
    ],
)
@pytest.mark.usefixtures("own")
def test_wrong_arguments_are_refused(words: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    code, _, errors = called(
        "tasks", "Terminal-v0", *(str(tmp_path / "out") if word == "OUT" else word for word in words)
    )

    assert code == 2
    assert problem in errors


def test_the_images_of_all_generated_tasks_are_built() -> None:
    drawn = TerminalOptions(families="all", difficulty=[1, 5])

    built = {image_of(task) for task in commands.family_tasks()}
    assert {image_of(drawn.task(seed)) for seed in range(60)} == built


def test_a_task_is_not_exported_over_a_folder(own: Path, tmp_path: Path) -> None:
    portable(own / "first")
    (tmp_path / "out" / "sum").mkdir(parents=True)
    code, _, errors = terminal("export", tmp_path / "out")

    assert code == 2
    assert "exists already; choose another folder" in errors
    assert not (tmp_path / "out" / "first").exists()
