r"""Arithmetic: one question, one number as the answer.

Observation  the question, ``What is 23+41? Answer with a number.``; after the answer, the solution: ``23+41 = 64``
Actions      any text. The answer is the last number in ``<answer>64</answer>`` or ``\boxed{64}``. In a text with
             neither, the answer is the last number of the text; see `parse_number`
Reward       1.0 for the right number, otherwise 0.0
Ends         terminated after one answer
Problems     operands and operators are drawn uniformly; problems in which a division has a remainder are rejected
Options      see `ArithmeticOptions`
Info         ``action_is_valid`` (whether the answer contains a number), ``success``; at reset ``level``:
             ``{"digits": digits of the longest operand, "operations": number of operators}``
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from random import Random
from typing import Any, ClassVar, NamedTuple, TypeAlias

import gymnasium

from envkit.env import check_seed
from envkit.errors import OptionError, StepOrderError, UsageError
from envkit.spaces import Utf8Text
from envkit.types import JSON, Info, Observation, Options, stable_hash

from .answer import parse_number
from .counter_rng import episode_seed
from .options import check_boolean, check_integer, check_number, check_range, check_split, override
from .split import Split, split_by_share

_OPERATORS = "+-*/"
_MAX_OPERAND = 10**9
_MAX_TERMS = 8
_MAX_ANSWER = 1 << 20
_DRAWS = 20_000
"""Number of problems to draw at most. If none of them fits the options, the search fails."""

_QUESTION = "What is {}?"
_HOW_TO_ANSWER = " Answer with a number."
_ASKED = re.compile(rf"What is ([0-9]{{1,10}}(?:[+\-*/][0-9]{{1,10}}){{1,{_MAX_TERMS - 1}}})\?")
_PARTS = re.compile(r"([+\-*/]?)([0-9]+)")

# A summand: its sign, and its factors. Each factor comes with its operator "*" or "/".
_Product: TypeAlias = tuple[str, list[tuple[str, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticOptions:
    """Options of the arithmetic problems.

    Attributes:
        operations: Allowed operators, a subset of ``+-*/``. Divisions are exact.
        terms: Number of operands of a problem, 2 to 8.
        operands: Smallest and largest operand, from 0 to 1,000,000,000; [10, 99] gives two-digit numbers.
        split: Draw only problems of this split ("train", "validation" or "eval"); None draws any. Problems that differ
            only in the order of a sum or product, such as 23+41 and 41+23, are in the same split.
        held_out: Share of all problems that each of the validation split and the eval split gets, 0.001 to 0.45.
        instructions: Whether the question includes the answer format.
    """

    operations: str = "+"
    terms: int = 2
    operands: Sequence[int] = (1, 99)
    split: Split | None = None
    held_out: float = 0.1
    instructions: bool = True

    def __post_init__(self) -> None:
        value: object = self.operations
        if not isinstance(value, str) or not set(value) <= set(_OPERATORS) or not 0 < len(value) == len(set(value)):
            raise OptionError("operations", f"must be some of {_OPERATORS}, each once, got {value!r}")
        check_integer("terms", self.terms, low=2, high=_MAX_TERMS)
        check_range("operands", self.operands, low=0, high=_MAX_OPERAND)
        check_split(self.split)
        check_number("held_out", self.held_out, low=0.001, high=0.45)
        check_boolean("instructions", self.instructions)


class ArithmeticProblem(NamedTuple):
    """A problem: an expression such as ``23+41``, its value, and the number of digits of the longest operand."""

    text: str
    answer: int
    digits: int


@lru_cache(maxsize=4096)
def draw_problem(
    seed: int, operations: str, terms: int, operands: tuple[int, int], split: Split | None, held_out: float
) -> ArithmeticProblem:
    """Return the problem of `seed`, the same in every process. See `ArithmeticOptions` for the arguments.

    Raises:
        OptionError: None of the 20,000 problems drawn fits the arguments.
    """
    operators = "".join(one for one in _OPERATORS if one in operations)
    low, high = operands
    rng = Random(stable_hash("Arithmetic", seed, operators, terms, low, high))
    chance = rng.random  # Use only `random()`: other methods may return other numbers in other Python versions.
    for _ in range(_DRAWS):
        numbers = [low + int(chance() * (high - low + 1)) for _ in range(terms)]
        signs = ["", *(operators[int(chance() * len(operators))] for _ in range(terms - 1))]
        text = "".join(f"{sign}{number}" for sign, number in zip(signs, numbers, strict=True))
        products = _products(text)
        answer = _value(products)
        if answer is not None and (split is None or split_by_share(_canonical(products), held_out) == split):
            return ArithmeticProblem(text, answer, len(str(max(numbers))))
    kind = f"operations={operators!r}, terms={terms}, operands={list(operands)}"
    if split is None:
        raise OptionError("operations", f"found no problem with exact divisions for {kind}; widen operands")
    raise OptionError("split", f"found no problem of split {split!r} for {kind}; widen operands")


class Arithmetic(gymnasium.Env[str, str]):
    """An environment with one arithmetic problem per episode.

    Args:
        options: See `ArithmeticOptions`; ``reset(options=...)`` overrides single options for one episode.

    Raises:
        OptionError: An option is unknown or its value is invalid.
    """

    metadata = {  # noqa: RUF012 - as Gymnasium's
        "render_modes": [],
        "metrics": {"action_is_valid": "mean", "success": "last"},
    }

    options: ClassVar[Options] = asdict(ArithmeticOptions())

    def __init__(self, *, render_mode: str | None = None, **options: JSON) -> None:
        if render_mode is not None:
            raise OptionError("render_mode", f"{render_mode!r} is not supported: there is nothing to draw; use None")
        self.observation_space = Utf8Text(4096)
        self.action_space = Utf8Text(_MAX_ANSWER)
        self._defaults = override(ArithmeticOptions(), options)
        self._first, self._episode = -1, -1
        self._problem: ArithmeticProblem | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start an episode. A `seed` starts a sequence of questions; a reset without `seed` takes the next question."""
        self._problem = None
        chosen = override(self._defaults, options)
        check_seed(seed)
        super().reset(seed=seed)
        if seed is None and self._first < 0:
            seed = int(self.np_random.integers(1 << 31))
        self._first, self._episode = (self._first, self._episode + 1) if seed is None else (int(seed), 0)
        self._problem = draw_problem(
            episode_seed(self._first, self._episode),
            chosen.operations,
            chosen.terms,
            (chosen.operands[0], chosen.operands[1]),
            chosen.split,
            float(chosen.held_out),
        )
        question = _QUESTION.format(self._problem.text) + (_HOW_TO_ANSWER if chosen.instructions else "")
        return question, {"success": False, "level": {"digits": self._problem.digits, "operations": chosen.terms - 1}}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Grade the answer and end the episode."""
        problem, self._problem = self._problem, None
        if problem is None:
            raise StepOrderError("step before reset, or after the end of the episode")
        if not isinstance(action, str):
            raise UsageError(f"an action must be text, got {action!r}")
        number = parse_number(action)
        success = number == problem.answer
        info: Info = {"action_is_valid": number is not None, "success": success}
        return f"{problem.text} = {problem.answer}", float(success), True, False, info


class ArithmeticExpert:
    """An expert that reads the question from the observation and computes the answer. It supports all options."""

    def __init__(self, **options: JSON) -> None: ...

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return the right number. The result is empty if there is no question, or if a division has a remainder."""
        found = _ASKED.search(observation.text)
        value = None if found is None else _value(_products(found[1]))
        return () if value is None else (str(value),)

    def is_hazardous(self, observation: Observation) -> bool:
        return False

    def answer(self, move: str) -> str:
        return f"<answer>{move}</answer>"


def _products(text: str) -> list[_Product]:
    """Split the expression `text` into its summands, each of which is a product."""
    products: list[_Product] = []
    for operator, digits in _PARTS.findall(text):
        if operator in ("*", "/"):
            products[-1][1].append((operator, int(digits)))
        else:
            products.append((operator or "+", [("*", int(digits))]))
    return products


def _value(products: Sequence[_Product]) -> int | None:
    """Return the value of an expression, given its summands; None if a division has a remainder."""
    total = 0
    for sign, factors in products:
        value = 1
        for operator, factor in factors:
            if operator == "*":
                value *= factor
            elif factor == 0 or value % factor:
                return None
            else:
                value //= factor
        total += value if sign == "+" else -value
    return total


def _canonical(products: Sequence[_Product]) -> str:
    """Return a normal form. Problems that differ only in the order of a sum or product have the same normal form."""
    return str(sorted((sign, sorted(factors)) for sign, factors in products))
