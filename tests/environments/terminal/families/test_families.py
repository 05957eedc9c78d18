"""Generated tasks are solvable, but not by doing nothing or by guessing, and a seed always gives the same task."""

import hashlib
import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from envkit.environments.terminal.families import FAMILIES, HELD_OUT, write_drawn
from envkit.environments.terminal.families.family import MAX_DIFFICULTY, WORDS, DrawnTask

from .play import play

LEVELS = [(name, difficulty) for name in FAMILIES for difficulty in range(1, MAX_DIFFICULTY + 1)]
levels = pytest.mark.parametrize(("name", "difficulty"), LEVELS)
SEEDS = 75
DIGESTS = {
    "text": ["2962548973696e3c", "c94c6d8d13143399", "c670ff1f3297251f", "2b2cdd390e0605c4", "6a4268fb6cb1ea7a"],
    "trees": ["6334fccad544c91c", "1d58eca0054732b5", "de0c59dbd3629efc", "e20a1eb658f2b164", "6f036761f1a1360b"],
    "permissions": ["e64b210a560d73ea", "079e5b9dac88635f", "788ac96163de2f5b", "f30132798c4ea013", "e9ca049ba31a2b2e"],
    "processes": ["7161995db26c33b5", "82a7817bad4e5e30", "4b4ac5311ad2019e", "375f968eec8a3bfb", "385ae351e3ec21ac"],
    "archives": ["915a1a44a92a0ff7", "367454d06dbf1b3c", "07443f0dad072000", "600055839c47c757", "85dbceaabf10d903"],
    "queries": ["4814630685bdc846", "2e6333dc0383eb64", "a1267d443414c4a1", "54d24197eef4a97c", "88390325c051a2d6"],
    "logs": ["1d3cc9b452580a76", "84aca3ea28084c15", "cb94772bf2041e0b", "7220111cedcf87ae", "1331bd665ba3ee3e"],
    "git": ["f2d3cf8c8738ddee", "92125474f8b388d5", "f5297cb8e398a82f", "b467f79842d05e5c", "1297d5e55b72a35a"],
    "config": ["3895a5e05360f80f", "f47ccb1e7b832179", "46f76a22d635c399", "3e6b553ce33b0483", "671bc08c040f5fb2"],
    "scripts": ["5cbffe07e1f39f70", "d7b97062abcb2583", "9b4910851706b6c5", "89948df47a7c99ec", "4382d9c457b1ae68"],
}


def drawn(name: str, seed: int, difficulty: int) -> DrawnTask:
    return FAMILIES[name].task(seed, difficulty)


@pytest.fixture(scope="module", params=LEVELS, ids=lambda level: f"{level[0]}-{level[1]}")
def level(request: pytest.FixtureRequest) -> tuple[str, int]:
    """A family and a difficulty."""
    name, difficulty = request.param
    return name, difficulty


@pytest.fixture(scope="module")
def tasks(level: tuple[str, int]) -> list[DrawnTask]:
    """The tasks of the first seeds of a level."""
    name, difficulty = level
    return [drawn(name, seed, difficulty) for seed in range(SEEDS)]


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


def test_there_are_ten_families_three_of_them_held_out() -> None:
    assert len(FAMILIES) == 10
    assert FAMILIES.keys() > HELD_OUT
    assert len(HELD_OUT) == 3


def test_words_are_different_and_none_is_part_of_another() -> None:
    assert not [(one, other) for one in WORDS for other in WORDS if one != other and one in other]
    assert len(set(WORDS)) == len(WORDS)


@levels
def test_the_oracle_solves_the_task(name: str, difficulty: int) -> None:
    task = drawn(name, difficulty, difficulty)
    assert play(task, task.solution) == ""


@pytest.mark.parametrize(("name", "difficulty"), [level for level in LEVELS if level[1] in (1, MAX_DIFFICULTY)])
def test_neither_doing_nothing_nor_the_solution_of_another_seed_solves_the_task(name: str, difficulty: int) -> None:
    task, other = drawn(name, 5, difficulty), drawn(name, 6, difficulty)
    assert play(task) != ""
    assert play(task, f"(\n{other.solution}\n) >/dev/null 2>&1 || true") != ""


def test_no_constant_result_solves_one_in_twenty_tasks(tasks: list[DrawnTask]) -> None:
    results = Counter(str([expected(case) for case in task.checks]) for task in tasks)
    assert results.most_common(1)[0][1] <= SEEDS / 20


def test_different_seeds_give_different_tasks(tasks: list[DrawnTask]) -> None:
    # Of n equally likely tasks, 75 seeds would repeat about 75**2 / 2n: none of 10,000 tasks, and 3 of 1,000.
    assert len({digest(task, with_checks=False) for task in tasks}) > SEEDS - 2


def test_a_task_is_small_and_the_same_everywhere(level: tuple[str, int], tasks: list[DrawnTask]) -> None:
    (name, difficulty), tasks = level, tasks[:20]
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
