"""Generated tasks are solvable, but not by doing nothing or by guessing, and a seed always gives the same task."""

import hashlib
import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from envkit.environments.terminal.families import FAMILIES, write_drawn
from envkit.environments.terminal.families.family import MAX_DIFFICULTY, WORDS, DrawnTask

from .play import play

SEEDS = 75
DIGESTS = {
    "text": "92543ea4dcba7459",
    "trees": "e8ccb0ca0aa23d99",
    "permissions": "52400bc5d24ffbce",
    "processes": "abcfd66e3d0ef676",
    "archives": "e7e46f9ade49a17c",
    "queries": "36580c8603718400",
    "logs": "5e6c3e3100ff5bab",
    "git": "afcfda52120ec058",
    "config": "2f8d6abfc1a98af3",
    "scripts": "60bbd0f3c80fca8e",
}


def drawn(name: str, seed: int, difficulty: int) -> DrawnTask:
    return FAMILIES[name].task(seed, difficulty)


def digest(task: DrawnTask, *, with_checks: bool = True) -> str:
    files = {path: str(content) for path, content in task.files.items()}
    parts: list[object] = [task.instruction, files, task.setup, task.services]
    parts += [task.solution, list(task.checks)] if with_checks else []
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def expected(case: Any) -> object:
    """What a guess must hit: the expected contents of a check, without the names of files and programs."""
    match case["kind"]:
        case "tree":
            return sorted(case["entries"])
        case "modes":
            return sorted(case["modes"].values())
        case "archive":
            return case["members"]
        case "run":
            return [case["stdout"], case["exit"], [expected(inner) for inner in case["then"]]]
        case _:
            return {key: value for key, value in case.items() if key != "path"}


def test_words_are_different_and_none_is_part_of_another() -> None:
    assert not [(one, other) for one in WORDS for other in WORDS if one != other and one in other]
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("difficulty", [1, 3, MAX_DIFFICULTY])
def test_the_oracle_solves_the_task(name: str, difficulty: int) -> None:
    task = drawn(name, difficulty, difficulty)
    assert play(task, task.solution) == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_neither_doing_nothing_nor_the_solution_of_another_seed_solves_the_task(name: str) -> None:
    task, other = drawn(name, 5, 1), drawn(name, 6, 1)
    assert play(task) != ""
    assert play(task, f"(\n{other.solution}\n) >/dev/null 2>&1 || true") != ""


@pytest.mark.parametrize("name", FAMILIES)
def test_seeds_give_different_tasks_and_no_constant_result_solves_one_in_twenty(name: str) -> None:
    tasks = [drawn(name, seed, 1) for seed in range(SEEDS)]
    # Of n equally likely tasks, 75 seeds would repeat about 75**2 / 2n: none of 10,000 tasks, and 3 of 1,000.
    assert len({digest(task, with_checks=False) for task in tasks}) > SEEDS - 2
    results = Counter(str([expected(case) for case in task.checks]) for task in tasks)
    assert results.most_common(1)[0][1] <= SEEDS / 20


@pytest.mark.parametrize("name", FAMILIES)
def test_a_task_is_small_and_the_same_everywhere(name: str) -> None:
    tasks = [drawn(name, seed, difficulty) for difficulty in range(1, MAX_DIFFICULTY + 1) for seed in range(5)]
    assert max(sum(len(content) for content in task.files.values()) for task in tasks) < 40_000
    assert max(len(json.dumps(list(task.checks))) for task in tasks) < 80_000
    assert hashlib.sha256("".join(map(digest, tasks)).encode()).hexdigest()[:16] == DIGESTS[name]


def test_an_unknown_difficulty_is_an_error() -> None:
    with pytest.raises(ValueError, match="difficulty must lie in 1 to 5, got 6"):
        FAMILIES["text"].task(0, 6)


def test_a_task_is_written_with_its_check_and_cases(tmp_path: Path) -> None:
    write_drawn(FAMILIES["git"], 7, 3, tmp_path / "task")
    task = drawn("git", 7, 3)
    tests = tmp_path / "task" / "tests"
    assert (tmp_path / "task" / "instruction.md").read_text().strip() == task.instruction
    assert json.loads((tests / "cases.json").read_text()) == list(task.checks)
    assert "def verify() -> None:" in (tests / "check.py").read_text()
    found = tomllib.loads((tmp_path / "task" / "task.toml").read_text())
    assert found["task"]["name"] == "envkit/git-3-7"
    assert found["metadata"]["envkit"]["packages"] == ["git"]
