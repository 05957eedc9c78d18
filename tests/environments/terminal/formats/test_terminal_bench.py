"""Tasks of Terminal-Bench 1, and folders with tasks of both formats."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from envkit.environments.split import SPLITS
from envkit.environments.terminal.formats import read_tasks
from envkit.environments.terminal.options import TerminalOptions, TerminalTasks
from envkit.errors import ConfigError, UsageError
from tests.environments.terminal.formats.folders import harbor, terminal_bench, write_files

YAML = "instruction: |-\n  Do it.\ndifficulty: easy\ncategory: files\nmax_agent_timeout_sec: 90\ntags: [a]\n"


def test_a_task_is_read_with_its_tests_and_solution(tmp_path: Path) -> None:
    (task,) = read_tasks(terminal_bench(tmp_path / "first", YAML))
    verifier = task.verifier

    assert (task.name, task.difficulty, task.category, task.network) == ("first", "easy", "files", "open")
    assert (task.instruction, task.timeout_s) == ("Do it.", 90)
    assert task.solution is not None
    assert (task.solution / "solve.sh").read_text() == "touch done\n"
    assert (verifier.tests / "test.sh").read_text() == "pytest $TEST_DIR\n"
    assert (verifier.tests / "test_outputs.py").is_file()
    assert (verifier.reads, verifier.is_separate, verifier.timeout_s) == ("pytest", False, 60)
    assert verifier.env == {"TEST_DIR": "/tests"}
    assert task.notes == ()


def test_the_commands_of_a_typed_solution_become_a_script(tmp_path: Path) -> None:
    typed = "- command: cd /app\n  min_timeout_sec: 1\n- command: |-\n    touch a\n    touch b\n  block: true\n"
    folder = terminal_bench(tmp_path, files={"solution.yaml": typed})
    (folder / "solution.sh").unlink()
    (task,) = read_tasks(folder)

    assert task.solution is not None
    assert (task.solution / "solve.sh").read_text() == "cd /app\ntouch a\ntouch b\n"


@pytest.mark.parametrize(
    ("yaml", "files", "problem"),
    [
        (
            "instruction: x\nparser_name: swebench\n",
            {},
            "task.yaml: parser_name: envkit reads only",
        ),
        ("difficulty: easy\n", {}, "task.yaml: Object missing required field `instruction`"),
        ("instruction: [", {}, "task.yaml: while parsing"),
        ("instruction: x\n", {"docker-compose.yaml": "services:\n  client: {}\n  db: {}\n"}, "has client, db"),
        (
            "instruction: x\n",
            {"docker-compose.yaml": "services: 1\n"},
            "Expected `object`, got `int` - at `$.services`",
        ),
    ],
)
def test_a_task_that_cannot_be_played_is_an_error(
    yaml: str, files: dict[str, str], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_tasks(terminal_bench(tmp_path, yaml, files))


def test_options_of_the_container_that_envkit_ignores_are_notes(tmp_path: Path) -> None:
    compose = "services:\n  client:\n    build: .\n    privileged: true\n    volumes: [a]\n    environment: [B=1]\n"
    (task,) = read_tasks(terminal_bench(tmp_path, files={"docker-compose.yaml": compose}))

    assert task.notes == ("docker-compose.yaml: privileged: is ignored",)


def test_a_folder_of_tasks_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    harbor(tmp_path / "b")
    terminal_bench(tmp_path / "a")
    write_files(tmp_path, {".git/x.txt": "", "README.md": ""})

    assert [task.name for task in read_tasks(tmp_path)] == ["a", "b"]


def test_tasks_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b", "c"):
        harbor(tmp_path / name)
    harbor(tmp_path / "d", "[environment]\ncpus = true\n")
    terminal_bench(tmp_path / "e", "difficulty: easy\n")
    write_files(tmp_path, {"f/instruction.md": "", ".git/x": "", "__pycache__/x": "", "README.md": ""})

    assert [task.name for task in read_tasks(tmp_path)] == ["a", "b", "c"]
    (line,) = caplog.messages
    assert line == (
        "left out 3 of 6 folders, which cannot be played (d, e, f); for the reasons: "
        f"envkit tasks Terminal-v0 ls {tmp_path}"
    )
    assert TerminalTasks(tasks=str(tmp_path)).notes() == [line]


def test_a_large_folder_with_unusable_tasks_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(200):
        harbor(tmp_path / f"{number:03}", "[environment]\ncpus = true\n" if number % 40 == 0 else "")
    options = [TerminalOptions(tasks=str(tmp_path), split=split) for split in (None, *SPLITS)]
    count, *parts = (len(one.all()) for one in options)

    assert (count, sum(parts), len(caplog.messages)) == (195, 195, 1)
    assert min(parts) > 0


def test_if_no_task_can_be_used_the_problems_of_all_are_the_error(tmp_path: Path) -> None:
    harbor(tmp_path / "a", "[environment]\ncpus = true\n")
    harbor(tmp_path / "b", 'artifacts = ["x"]\n')

    with pytest.raises(ConfigError) as error:
        read_tasks(tmp_path)
    assert [problem.removeprefix(f"{tmp_path}/")[:12] for problem in error.value.problems] == [
        "a/task.toml:",
        "b/task.toml:",
    ]


def test_a_folder_without_tasks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no tasks"):
        read_tasks(tmp_path)
