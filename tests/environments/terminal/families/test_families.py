"""Generated tasks: each is solvable, none is solved by doing nothing or by guessing, and a seed always gives the same."""

import hashlib
import json
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from envkit.environments.terminal.families import FAMILIES, write_drawn
from envkit.environments.terminal.families.family import MAX_DIFFICULTY, WORDS, DrawnTask
from envkit.types import JSON

from .play import play

LEVELS = [(name, difficulty) for name in FAMILIES for difficulty in range(1, MAX_DIFFICULTY + 1)]
levels = pytest.mark.parametrize(("name", "difficulty"), LEVELS)
DIGESTS = {}


def drawn(name: str, seed: int, difficulty: int) -> DrawnTask:
    return FAMILIES[name].task(seed, difficulty)


def digest(task: DrawnTask, *, with_checks: bool = True) -> str:
    files = {path: str(content) for path, content in task.files.items()}
    parts = [task.instruction, files, task.setup, task.services]
    parts += [task.solution, list(task.checks)] if with_checks else []
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def expected(task: DrawnTask) -> str:
    """What a guess must hit: the expected contents of the checks, without names of files and programs."""

    def values(value: JSON) -> JSON:
        if not isinstance(value, dict):
            return value
        left = {"path", "argv", "files", "stdin", "remove"} if value.get("kind") != "git" else {"path"}
        if value.get("kind") == "tree":
            return sorted(value["entries"])  # type: ignore[arg-type]
        if value.get("kind") == "modes":
            return sorted(value["modes"].values())  # type: ignore[union-attr, type-var]
        if value.get("kind") == "archive":
            return value["members"]
        return {key: [values(item) for item in part] if key == "then" else part for key, part in value.items() if key not in left}  # type: ignore[union-attr]

    return json.dumps([values(dict(case)) for case in task.checks], sort_keys=True)


def test_there_are_ten_families_three_of_them_held_out() -> None:
    assert len(FAMILIES) == 10
    assert sorted(name for name, family in FAMILIES.items() if family.held_out) == ["archives", "config", "logs"]


def test_words_are_different_and_none_is_part_of_another() -> None:
    assert not [(one, other) for one in WORDS for other in WORDS if one != other and one in other]
    assert len(set(WORDS)) == len(WORDS)


@levels
def test_the_oracle_solves_the_task_and_doing_nothing_does_not(name: str, difficulty: int) -> None:
    seeds = range(difficulty, difficulty + 2)
    for seed in seeds:
        task = drawn(name, seed, difficulty)
        assert play(task, task.solution) == "", seed
        assert play(task) != "", seed


@levels
def test_the_solution_of_another_seed_does_not_solve_the_task(name: str, difficulty: int) -> None:
    for seed in range(2):
        task = drawn(name, seed, difficulty)
        other = drawn(name, seed + 100, difficulty).solution
        assert play(task, f"({other}) >/dev/null 2>&1 || true") != "", seed


@levels
def test_no_constant_result_solves_one_in_twenty_tasks(name: str, difficulty: int) -> None:
    results = Counter(expected(drawn(name, seed, difficulty)) for seed in range(400))
    assert results.most_common(1)[0][1] < 400 / 20


@levels
def test_two_thousand_seeds_give_almost_as_many_tasks(name: str, difficulty: int) -> None:
    # With n equally likely tasks, 2,000 seeds are expected to have about 2,000**2 / 2n equal pairs: 200 of 10,000 tasks.
    tasks = {digest(drawn(name, seed, difficulty), with_checks=False) for seed in range(2000)}
    assert len(tasks) > 1950


@levels
def test_a_task_is_small_and_the_same_everywhere(name: str, difficulty: int) -> None:
    tasks = [drawn(name, seed, difficulty) for seed in range(20)]
    assert max(sum(len(content) for content in task.files.values()) for task in tasks) < 40_000
    assert max(len(json.dumps(list(task.checks))) for task in tasks) < 80_000
    found = hashlib.sha256("".join(map(digest, tasks)).encode()).hexdigest()[:16]
    assert found == DIGESTS[name][difficulty - 1]


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
