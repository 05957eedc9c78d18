"""Programming tasks: generated ones, whose difficulty is exact, and the set of tasks of the environment.

A generated task asks for a function that composes `level` operations. A seed draws the same task in every process.
There are about 130 compositions of level 1, 1,900 of level 2, and far more of higher levels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from random import Random
from typing import NamedTuple

from envkit.errors import OptionError
from envkit.types import JSON, stable_hash

from ..split import Split, split_of
from .operations import KINDS, NOUNS, Operation, Type, draw_value

MAX_LEVEL = 6
HIDDEN_TESTS = 12
_EXAMPLES = 2
_DRAWS = 20_000
"""Number of compositions to draw at most."""
_MAX_RESULT = 300
"""Maximum characters of a result as JSON."""


def size(value: JSON) -> int:
    """Return the number of bytes of a value as JSON."""
    return len(json.dumps(value))


class Case(NamedTuple):
    """A test of a program.

    Attributes:
        arguments: Arguments of the function; for a whole program, the text of its standard input.
        expected: The result; for a whole program, its standard output.
    """

    arguments: Sequence[JSON]
    expected: JSON


@dataclass(frozen=True, slots=True)
class Problem:
    """A programming task.

    Attributes:
        text: What to write, without examples.
        entry: The function, such as ``solve``, or method, such as ``Solution.solve``; empty for a whole program that
            reads standard input and writes standard output.
        examples: Tests that the player sees.
        tests: Hidden tests.
        stub: The beginning of a solution.
        solution: A correct solution; None if there is no known solution.
        level: Number of composed operations; 0 for a task that was read from a file.
    """

    text: str
    entry: str
    examples: Sequence[Case]
    tests: Sequence[Case]
    stub: str
    solution: str | None
    level: int = 0


@lru_cache(maxsize=1024)
def draw_problem(seed: int, low: int, high: int, split: Split | None) -> Problem:
    """Return the problem of `seed` with `low` to `high` operations. Its split is that of its operations.

    Compositions that a shorter one may replace are rejected: on the hidden tests, one of their own parts or a single
    operation gives the same results. So are compositions with one result for more than half of the tests.

    Raises:
        OptionError: None of the 20,000 compositions drawn fits the arguments.
    """
    rng = Random(stable_hash("Code", seed, low, high))
    for _ in range(_DRAWS):
        operations = _draw_operations(rng, low + int(rng.random() * (high - low + 1)))
        if split is None or split_of("; ".join(one.phrase for one in operations)) == split:
            cases = _draw_cases(operations, rng)
            if cases is not None and not _is_reducible(operations, cases[_EXAMPLES:]):
                return _problem(operations, cases)
    raise OptionError("level", f"found no problem of level {low} to {high} in split {split!r}; use another level")


def _draw_operations(rng: Random, count: int) -> list[Operation]:
    found: list[Operation] = []
    takes = list(NOUNS)[int(rng.random() * len(NOUNS))]
    while len(found) < count:
        family = found[-1].family if found else ""
        kinds = [kind for kind in KINDS if kind[0].takes == takes and kind[0].family != family]
        kind = kinds[int(rng.random() * len(kinds))]
        found.append(kind[int(rng.random() * len(kind))])
        takes = found[-1].gives
    return found


def _draw_cases(operations: Sequence[Operation], rng: Random) -> list[Case] | None:
    """Draw different arguments, and return them with the results; None if a result is too long or too frequent."""
    values: dict[str, JSON] = {}
    while len(values) < _EXAMPLES + HIDDEN_TESTS:
        value = draw_value(operations[0].takes, rng)
        values[json.dumps(value)] = value
    cases = [Case((value,), apply(operations, value)) for value in values.values()]
    results = [json.dumps(case.expected) for case in cases]
    hidden = results[_EXAMPLES:]
    is_usual = max(map(hidden.count, hidden)) <= HIDDEN_TESTS // 2 and max(map(len, results)) <= _MAX_RESULT
    return cases if is_usual else None


def apply(operations: Sequence[Operation], value: JSON) -> JSON:
    """Return the result of the composition for the argument `value`."""
    for operation in operations:
        value = operation(value)
    return value


def _is_reducible(operations: Sequence[Operation], tests: Sequence[Case]) -> bool:
    """Return whether a shorter composition gives the expected result in all `tests`."""
    return any(
        all(is_same(apply(shorter, test.arguments[0]), test.expected) for test in tests)
        for shorter in _shorter(operations)
    )


def _shorter(operations: Sequence[Operation]) -> Iterator[Sequence[Operation]]:
    """Yield all parts of a composition that are compositions of the same type, and all such single operations."""
    takes, gives = operations[0].takes, operations[-1].gives
    for count in range(len(operations)):
        for some in combinations(operations, count):
            types: list[Type] = [takes, *(one.gives for one in some)]
            if types[-1] == gives and all(one.takes == type for one, type in zip(some, types, strict=False)):
                yield some
    if len(operations) > 1:
        yield from ((one,) for kind in KINDS for one in kind if (one.takes, one.gives) == (takes, gives))


def is_same(found: JSON, expected: JSON) -> bool:
    """Return whether two values are equal and of the same types: 1 and 1.0 or 1 and True are not the same."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(is_same(found[key], expected[key]) for key in expected)
    return found == expected


def _problem(operations: Sequence[Operation], cases: Sequence[Case]) -> Problem:
    takes, gives = operations[0].takes, operations[-1].gives
    signature = f"solve(x: {takes}) -> {gives}"
    lines = [f"    x = {one.code}" for one in operations[:-1]]
    steps = "\n".join(f"{number}. {one.phrase}" for number, one in enumerate(operations, 1))
    return Problem(
        text=f"Write a Python function `{signature}`. "
        f"It does the following with the {NOUNS[takes]} `x`, and returns the result:\n{steps}",
        entry="solve",
        examples=cases[:_EXAMPLES],
        tests=cases[_EXAMPLES:],
        stub=f"def {signature}:\n    raise NotImplementedError\n",
        solution="\n".join([f"def {signature}:", *lines, f"    return {operations[-1].code}"]) + "\n",
        level=len(operations),
    )
