"""The operations of which generated programming tasks are composed: a phrase in English and an expression in Python.

An operation takes a value ``x`` of one type and returns a value of one type. Every operation is defined for every value
of its type, the empty list and the empty string included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any, Literal, NamedTuple, TypeAlias

from envkit.types import JSON

Type: TypeAlias = Literal["int", "list[int]", "str", "list[str]"]

NOUNS: Mapping[Type, str] = {
    "int": "integer",
    "list[int]": "list of integers",
    "str": "string",
    "list[str]": "list of words",
}
"""The types, as the prompts name them."""


class Operation(NamedTuple):
    """An operation: what it does in English, and as a Python expression of ``x``.

    Operations of the same family are never neighbours, because the two could be one operation.
    """

    family: str
    takes: Type
    gives: Type
    phrase: str
    code: str

    def __call__(self, value: JSON) -> Any:
        return _compiled(self.code)(value)


_Kind: TypeAlias = tuple[str, str, str] | tuple[str, str, str, Sequence[int]]
"""Family, phrase and code of an operation, and the numbers that may replace ``{n}`` in phrase and code."""

_KINDS: Mapping[tuple[Type, Type], Sequence[_Kind]] = {
    ("int", "int"): [
        ("add", "add {n} to it", "x + {n}", range(2, 10)),
        ("multiply", "multiply it by {n}", "x * {n}", range(2, 6)),
        ("multiply", "negate it", "-x"),
        ("square", "square it", "x * x"),
        ("absolute", "take its absolute value", "abs(x)"),
        ("divide", "divide it by {n}, rounding down", "x // {n}", range(2, 6)),
        ("modulo", "take its remainder modulo {n} (from 0 to {n} - 1)", "x % {n}", range(5, 13)),
        ("digits", "add up the decimal digits of its absolute value", "sum(int(d) for d in str(abs(x)))"),
        ("digits", "reverse the decimal digits of its absolute value", "int(str(abs(x))[::-1])"),
        ("bits", "count the ones in the binary form of its absolute value", 'bin(abs(x)).count("1")'),
    ],
    ("int", "str"): [
        ("text", "convert it to a decimal string", "str(x)"),
        ("bits", "write its absolute value in binary, without a prefix", 'format(abs(x), "b")'),
    ],
    ("int", "list[int]"): [
        ("digits", "list the decimal digits of its absolute value", "[int(d) for d in str(abs(x))]"),
        ("range", "list the integers from 1 to its remainder modulo 9", "list(range(1, x % 9 + 1))"),
    ],
    ("list[int]", "list[int]"): [
        ("add", "add {n} to each number", "[v + {n} for v in x]", range(1, 10)),
        ("multiply", "multiply each number by {n}", "[v * {n} for v in x]", range(2, 6)),
        ("multiply", "negate each number", "[-v for v in x]"),
        ("square", "square each number", "[v * v for v in x]"),
        ("absolute", "replace each number by its absolute value", "[abs(v) for v in x]"),
        (
            "modulo",
            "replace each number by its remainder modulo {n} (from 0 to {n} - 1)",
            "[v % {n} for v in x]",
            range(3, 10),
        ),
        ("order", "reverse the list", "x[::-1]"),
        ("order", "sort the numbers, smallest first", "sorted(x)"),
        ("order", "sort the numbers, largest first", "sorted(x, reverse=True)"),
        ("order", "move the first number to the end", "x[1:] + x[:1]"),
        ("unique", "keep only the first occurrence of each number", "list(dict.fromkeys(x))"),
        ("parity", "keep only the even numbers", "[v for v in x if v % 2 == 0]"),
        ("parity", "keep only the odd numbers", "[v for v in x if v % 2 == 1]"),
        ("compare", "keep only the numbers larger than {n}", "[v for v in x if v > {n}]", range(10)),
        ("compare", "keep only the numbers smaller than {n}", "[v for v in x if v < {n}]", range(3, 13)),
        ("slice", "drop the first {n} numbers", "x[{n}:]", range(2, 4)),
        ("slice", "keep only the first {n} numbers", "x[:{n}]", range(2, 5)),
        ("slice", "keep every second number, starting with the first", "x[::2]"),
        (
            "sums",
            "replace each number by the sum of all numbers up to and including it",
            "[sum(x[: i + 1]) for i in range(len(x))]",
        ),
        ("sums", "list the differences between each number and the one before it", "[b - a for a, b in zip(x, x[1:])]"),
    ],
    ("list[int]", "int"): [
        ("fold", "add up the numbers", "sum(x)"),
        ("fold", "count the numbers", "len(x)"),
        ("fold", "count the different numbers", "len(set(x))"),
        ("fold", "take the largest number, or 0 if there are no numbers", "max(x, default=0)"),
        ("fold", "take the smallest number, or 0 if there are no numbers", "min(x, default=0)"),
    ],
    ("list[int]", "str"): [
        ("join", "join the numbers in decimal, with a comma between them", '",".join(str(v) for v in x)')
    ],
    ("str", "str"): [
        ("case", "convert it to upper case", "x.upper()"),
        ("case", "convert it to lower case", "x.lower()"),
        ("case", "swap upper and lower case", "x.swapcase()"),
        ("order", "reverse it", "x[::-1]"),
        ("order", "sort its characters by their codes", '"".join(sorted(x))'),
        ("unique", "keep only the first occurrence of each character", '"".join(dict.fromkeys(x))'),
        ("vowels", "remove the vowels (aeiou and AEIOU)", '"".join(c for c in x if c not in "aeiouAEIOU")'),
        ("letters", "keep only the letters", '"".join(c for c in x if c.isalpha())'),
        ("double", "append a copy of itself", "x + x"),
        ("slice", "drop the first {n} characters", "x[{n}:]", range(2, 4)),
        ("slice", "keep only the first {n} characters", "x[:{n}]", range(3, 7)),
        ("slice", "keep every second character, starting with the first", "x[::2]"),
    ],
    ("str", "int"): [
        ("fold", "count its characters", "len(x)"),
        ("fold", "count its different characters", "len(set(x))"),
        ("fold", "count its vowels (aeiou and AEIOU)", 'sum(c in "aeiouAEIOU" for c in x)'),
    ],
    ("str", "list[int]"): [("codes", "list the codes of its characters, as ord does", "[ord(c) for c in x]")],
    ("str", "list[str]"): [("split", "split it into words at white space", "x.split()")],
    ("list[str]", "list[str]"): [
        ("order", "reverse the order of the words", "x[::-1]"),
        ("order", "sort the words by their character codes, as sorted does", "sorted(x)"),
        ("order", "sort the words by length; words of the same length keep their order", "sorted(x, key=len)"),
        ("mirror", "reverse each word", "[w[::-1] for w in x]"),
        ("case", "convert each word to upper case", "[w.upper() for w in x]"),
        ("compare", "keep only the words with more than {n} characters", "[w for w in x if len(w) > {n}]", range(2, 5)),
        ("slice", "drop the first word", "x[1:]"),
    ],
    ("list[str]", "int"): [
        ("fold", "count the words", "len(x)"),
        ("fold", "add up the lengths of the words", "sum(len(w) for w in x)"),
    ],
    ("list[str]", "list[int]"): [("lengths", "list the lengths of the words", "[len(w) for w in x]")],
    ("list[str]", "str"): [
        ("join", "join the words with a space between them", '" ".join(x)'),
        (
            "join",
            "take the first longest word, or the empty string if there are no words",
            'max(x, key=len, default="")',
        ),
        ("join", "join the first characters of the words", '"".join(w[:1] for w in x)'),
    ],
}
"""The kinds of operations, by the types of their argument and result."""


def _operations(
    takes: Type, gives: Type, family: str, phrase: str, code: str, numbers: Sequence[int] = (0,)
) -> tuple[Operation, ...]:
    texts = [(phrase.replace("{n}", str(n)), code.replace("{n}", str(n))) for n in numbers]
    return tuple(Operation(family, takes, gives, *both) for both in texts)


KINDS = tuple(_operations(*types, *kind) for types, kinds in _KINDS.items() for kind in kinds)
"""The kinds of operations, each with its operation for every number."""


@lru_cache(maxsize=1024)
def _compiled(code: str) -> Callable[[JSON], Any]:
    function: Callable[[JSON], Any] = eval(f"lambda x: {code}", {})  # the table's own code
    return function


def draw_value(of: Type, rng: Random) -> JSON:
    """Draw an argument. It uses only ``rng.random``, whose numbers are the same in every version of Python."""

    def below(count: int) -> int:
        return int(rng.random() * count)

    def word() -> str:
        letters = "abcdefghijklmnoprstuwyaeioABCDEIOT013"
        return "".join(letters[below(len(letters))] for _ in range(1 + below(7)))

    if of == "int":
        return below(1099) - 99
    if of == "list[int]":
        return [below(40) - 15 for _ in range(2 + below(8))]
    words = [word() for _ in range(1 + below(5))]
    return " ".join(words) if of == "str" else list(words)
