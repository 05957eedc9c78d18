"""Generated programming tasks: the same in every process, solvable, and as difficult as their level says."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from envkit.environments.code import CodeTasks
from envkit.environments.code.operations import KINDS
from envkit.environments.code.tasks import draw_problem
from envkit.environments.split import SPLITS
from envkit.errors import OptionError

OPERATIONS = {one.phrase: one for kind in KINDS for one in kind}

MEANINGS: list[tuple[str, Any, Any]] = [
    ("divide it by 3, rounding down", -7, -3),
    ("take its remainder modulo 5 (from 0 to 5 - 1)", -7, 3),
    ("add up the decimal digits of its absolute value", -905, 14),
    ("reverse the decimal digits of its absolute value", -120, 21),
    ("count the ones in the binary form of its absolute value", -7, 3),
    ("write its absolute value in binary, without a prefix", -6, "110"),
    ("list the decimal digits of its absolute value", -45, [4, 5]),
    ("list the integers from 1 to its remainder modulo 9", 12, [1, 2, 3]),
    ("replace each number by its remainder modulo 4 (from 0 to 4 - 1)", [-1, 6], [3, 2]),
    ("sort the numbers, largest first", [1, 3, 2], [3, 2, 1]),
    ("move the first number to the end", [1, 2, 3], [2, 3, 1]),
    ("keep only the first occurrence of each number", [2, 1, 2, 1], [2, 1]),
    ("keep only the odd numbers", [-3, 0, 1, 2], [-3, 1]),
    ("keep only the numbers larger than 3", [3, 4], [4]),
    ("keep only the numbers smaller than 3", [2, 3], [2]),
    ("drop the first 2 numbers", [1, 2, 3], [3]),
    ("keep every second number, starting with the first", [1, 2, 3], [1, 3]),
    ("replace each number by the sum of all numbers up to and including it", [1, 2, 3], [1, 3, 6]),
    ("list the differences between each number and the one before it", [5, 7, 4], [2, -3]),
    ("take the largest number, or 0 if there are no numbers", [], 0),
    ("join the numbers in decimal, with a comma between them", [1, -2], "1,-2"),
    ("swap upper and lower case", "aB", "Ab"),
    ("sort its characters by their codes", "bA a", " Aab"),
    ("keep only the first occurrence of each character", "abab", "ab"),
    ("remove the vowels (aeiou and AEIOU)", "Ab ec", "b c"),
    ("keep only the letters", "a 1b", "ab"),
    ("count its vowels (aeiou and AEIOU)", "Ab e", 2),
    ("list the codes of its characters, as ord does", "aB", [97, 66]),
    ("sort the words by length; words of the same length keep their order", ["bb", "a", "aa"], ["a", "bb", "aa"]),
    ("keep only the words with more than 2 characters", ["ab", "abc"], ["abc"]),
    ("take the first longest word, or the empty string if there are no words", ["a", "bb", "cc"], "bb"),
    ("join the first characters of the words", ["ab", "cd"], "ac"),
]


@pytest.mark.parametrize(("phrase", "value", "result"), MEANINGS, ids=[phrase for phrase, *_ in MEANINGS])
def test_the_code_of_an_operation_does_what_its_phrase_says(phrase: str, value: Any, result: Any) -> None:
    assert OPERATIONS[phrase](value) == result


def test_every_operation_gives_its_type_for_every_value() -> None:
    values: dict[str, list[Any]] = {
        "int": [0, -1, 10**9],
        "list[int]": [[], [0], [-5, 5, 5]],
        "str": ["", " ", "a1 B"],
        "list[str]": [[], [""], ["b", "a"]],
    }
    types: dict[str, type] = {"int": int, "list[int]": list, "str": str, "list[str]": list}
    wrong = [
        (one.phrase, value)
        for one in OPERATIONS.values()
        for value in values[one.takes]
        if type(one(value)) is not types[one.gives]
    ]
    assert wrong == []
    assert len(KINDS) >= 30


def test_a_seed_draws_the_same_problem_in_every_process() -> None:
    problem = draw_problem(3, 2, 2, "eval")
    assert problem.text.splitlines()[1:] == [
        "1. count its vowels (aeiou and AEIOU)",
        "2. divide it by 2, rounding down",
    ]
    assert problem.examples[1] == (("ICy mIc3",), 1)


@pytest.mark.parametrize("level", range(1, 7))
def test_the_solution_has_the_level_and_passes_all_tests(level: int) -> None:
    for seed in range(20):
        problem = draw_problem(seed, level, level, None)
        assert problem.solution is not None
        names: dict[str, Any] = {}
        exec(problem.solution, names)
        assert [names["solve"](*case.arguments) for case in problem.tests] == [case.expected for case in problem.tests]
        assert problem.solution.count("\n") == level + 1
        assert len(problem.tests) == 12
        assert not any(case in problem.tests for case in problem.examples)


def test_no_part_of_a_composition_passes_the_tests() -> None:
    for seed in range(40):
        problem = draw_problem(seed, 4, 4, None)
        steps = [OPERATIONS[line.partition(". ")[2]] for line in problem.text.splitlines()[1:]]
        for count in range(4):
            for part in combinations(steps, count):
                assert not _passes(part, problem.tests), problem.text


def _passes(steps: Any, tests: Any) -> bool:
    for case in tests:
        value = case.arguments[0]
        try:
            for step in steps:
                value = step(value)
        except (TypeError, AttributeError, ValueError):  # the types do not fit
            return False
        if value != case.expected:
            return False
    return True


def test_splits_share_no_composition() -> None:
    texts = {split: {draw_problem(seed, 1, 2, split).text for seed in range(300)} for split in SPLITS}
    assert all(len(found) > 20 for found in texts.values())
    assert [one & other for one, other in combinations(texts.values(), 2)] == [set(), set(), set()]


def test_the_task_set_is_endless_and_its_tasks_name_their_split() -> None:
    tasks = CodeTasks(level=2)
    assert tasks.count("eval") is None
    assert tasks.task("eval", 7).options == {"level": 2, "split": "eval"}
    with pytest.raises(OptionError, match=r"^level: must be an integer from 1 to 6, got 7"):
        CodeTasks(level=7)
