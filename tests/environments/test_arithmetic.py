"""Arithmetic: problems are exact, splits are disjoint, and only the right number is rewarded."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from envkit.environments.arithmetic import Arithmetic, ArithmeticExpert
from envkit.environments.split import SPLITS
from envkit.errors import OptionError, UsageError
from envkit.types import JSON, Observation


def _problem(env: Arithmetic, seed: int) -> str:
    text, _ = env.reset(seed=seed)
    found = re.fullmatch(r"What is ([0-9+\-*/]+)\?", text)
    assert found is not None
    return found[1]


def _value(problem: str) -> Fraction:
    """The value by Python's own arithmetic."""
    return Fraction(eval(re.sub(r"\d+", r"Fraction(\g<0>)", problem), {"Fraction": Fraction}))


def test_the_question_includes_the_answer_format_unless_instructions_are_off() -> None:
    asked = Arithmetic(operands=[23, 23]).reset(seed=0)[0]
    assert asked == "What is 23+23? Answer with a number."
    assert Arithmetic(operands=[23, 23], instructions=False).reset(seed=0)[0] == "What is 23+23?"


@pytest.mark.parametrize(("terms", "operands"), [(2, [1, 49]), (3, [10, 99]), (5, [0, 12])])
def test_only_the_right_number_is_rewarded_and_the_expert_gives_it(terms: int, operands: list[JSON]) -> None:
    env = Arithmetic(operations="+-*/", terms=terms, operands=operands, instructions=False)
    expert = ArithmeticExpert()
    for seed in range(300):
        right = _value(_problem(env, seed))
        assert right.denominator == 1
        assert env.step(f"It is {right + 1}.")[1:4] == (0.0, True, False)
        text, _ = env.reset(seed=seed)
        move = expert.moves(Observation(text))[0]
        assert move == str(right)
        _, reward, terminated, truncated, info = env.step(expert.answer(move))
        assert (reward, terminated, truncated) == (1.0, True, False)
        assert info == {"action_is_valid": True, "success": True}


def test_a_problem_has_the_requested_difficulty_and_reports_it() -> None:
    env = Arithmetic(operations="+-", terms=4, operands=[100, 999], instructions=False)
    operators: Counter[str] = Counter()
    for seed in range(200):
        problem = _problem(env, seed)
        numbers = re.findall(r"\d+", problem)
        assert [len(number) for number in numbers] == [3, 3, 3, 3]
        operators.update(re.sub(r"\d", "", problem))
        assert env.reset(seed=seed)[1]["level"] == {"digits": 3, "operations": 3}
    assert set(operators) == {"+", "-"}
    assert operators["+"] / 600 == pytest.approx(0.5, abs=0.07)


def test_the_solution_is_not_observable_before_the_answer() -> None:
    env = Arithmetic(operands=[400, 499])
    text, info = env.reset(seed=5)
    answer = ArithmeticExpert().moves(Observation(text))[0]
    assert answer not in text
    assert answer not in str(info)
    assert env.step("I do not know.")[0].endswith(f" = {answer}")


def test_held_out_sums_of_numbers_to_49_are_400_of_2401() -> None:
    split = {}
    for name, draws in zip(SPLITS, (11_400, 1_700, 2_700), strict=True):  # until every problem was drawn
        env = Arithmetic(operands=[1, 49], split=name, held_out=0.16, instructions=False)
        split[name] = {_problem(env, seed) for seed in range(draws)}
    assert {name: len(problems) for name, problems in split.items()} == {"train": 1665, "validation": 336, "eval": 400}
    assert len(split["train"] | split["validation"] | split["eval"]) == 2401


def test_problems_that_differ_in_the_order_of_sums_and_products_are_in_one_split() -> None:
    options: dict[str, Any] = {"operations": "+-*/", "terms": 3, "operands": [1, 6], "instructions": False}
    problems = [{_problem(Arithmetic(split=name, **options), seed) for seed in range(400)} for name in SPLITS]
    shapes = [set(map(_shape, found)) for found in problems]
    assert sum(map(len, shapes)) == len(set().union(*shapes)) < sum(map(len, problems))


def _shape(problem: str) -> str:
    """The same text for problems that differ in the order of sums and products."""
    products = re.findall(r"([+-]?)(\d+(?:[*/]\d+)*)", problem)
    ordered = [(sign or "+", sorted(re.findall(r"[*/]?\d+", f"*{product}"))) for sign, product in products]
    return str(sorted(ordered))


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"operations": ""}, "operations"),
        ({"operations": "++"}, "operations"),
        ({"terms": 1}, "terms"),
        ({"operands": [9, 1]}, "operands"),
        ({"operands": [-1, 9]}, "operands"),
        ({"split": "test"}, "split"),
        ({"held_out": 0.5}, "held_out"),
        ({"instructions": 1}, "instructions"),
        ({"render_mode": "text"}, "render_mode"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(options: dict[str, Any], option: str) -> None:
    with pytest.raises(OptionError) as refusal:
        Arithmetic(**options)
    assert refusal.value.option == option


def test_a_range_without_a_problem_is_refused_after_a_bounded_search() -> None:
    empty = next(name for name in SPLITS if name != _split_of_the_only_problem())
    with pytest.raises(OptionError, match=rf"^split: found no problem of split '{empty}' .* widen operands"):
        Arithmetic(operands=[7, 7], split=empty).reset(seed=0)
    with pytest.raises(OptionError, match=r"^operations: found no problem with exact divisions"):
        Arithmetic(operations="/", operands=[0, 0]).reset(seed=0)


def _split_of_the_only_problem() -> str:
    for name in SPLITS:
        try:
            Arithmetic(operands=[7, 7], split=name).reset(seed=0)
        except OptionError:
            continue
        return name
    raise AssertionError("7+7 is in no split")


def test_an_answer_without_a_number_is_invalid_and_a_wrong_one_is_valid() -> None:
    env = Arithmetic(operands=[1, 49])
    infos = []
    for answer in ("It is hard.", "It is 1000.", "<answer>\N{SNOWMAN}</answer>"):
        env.reset(seed=0)
        infos.append(env.step(answer)[4])
    assert [info["action_is_valid"] for info in infos] == [False, True, False]
    assert [info["success"] for info in infos] == [False, False, False]


def test_an_answer_has_to_be_text() -> None:
    env = Arithmetic()
    env.reset(seed=0)
    with pytest.raises(UsageError, match="an action must be text, got 64"):
        env.step(64)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "What is up?", "What is 7?", "What is 7/2?", "What is 7/0?", "1+1"])
def test_the_expert_has_no_answer_without_an_exact_question(text: str) -> None:
    assert list(ArithmeticExpert().moves(Observation(text))) == []
