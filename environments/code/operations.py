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
    """An operation, with its number filled in.

    Attributes:
        family: Operations of the same family are never neighbours, because the two could be one operation.
        takes: Type of its argument.
        gives: Type of its result.
        phrase: What it does, in English.
        code: A Python expression of ``x``.
    """

    family: str
    takes: Type
    gives: Type
    phrase: str
    code: str

    def __call__(self, value: JSON) -> Any:
        return _compiled(self.code)(value)


_INT: Type = "int"
_INTS: Type = "list[int]"
_STR: Type = "str"
_WORDS: Type = "list[str]"


class _Kind(NamedTuple):
    """An operation whose number is open; `numbers` may replace ``{n}`` in its phrase and its code."""

    family: str
    takes: Type
    gives: Type
    phrase: str
    code: str
    numbers: Sequence[int] = (0,)

    def operations(self) -> tuple[Operation, ...]:
        texts = [(self.phrase.replace("{n}", str(n)), self.code.replace("{n}", str(n))) for n in self.numbers]
        return tuple(Operation(self.family, self.takes, self.gives, *both) for both in texts)


_KINDS = (
    _Kind("add", _INT, _INT, "add {n} to it", "x + {n}", range(2, 10)),
    _Kind("multiply", _INT, _INT, "multiply it by {n}", "x * {n}", range(2, 6)),
    _Kind("multiply", _INT, _INT, "negate it", "-x"),
    _Kind("square", _INT, _INT, "square it", "x * x"),
    _Kind("absolute", _INT, _INT, "take its absolute value", "abs(x)"),
    _Kind("divide", _INT, _INT, "divide it by {n}, rounding down", "x // {n}", range(2, 6)),
    _Kind("modulo", _INT, _INT, "take its remainder modulo {n} (from 0 to {n} - 1)", "x % {n}", range(5, 13)),
    _Kind("digits", _INT, _INT, "add up the decimal digits of its absolute value", "sum(int(d) for d in str(abs(x)))"),
    _Kind("digits", _INT, _INT, "reverse the decimal digits of its absolute value", "int(str(abs(x))[::-1])"),
    _Kind("bits", _INT, _INT, "count the ones in the binary form of its absolute value", 'bin(abs(x)).count("1")'),
    _Kind("text", _INT, _STR, "convert it to a decimal string", "str(x)"),
    _Kind("bits", _INT, _STR, "write its absolute value in binary, without a prefix", 'format(abs(x), "b")'),
    _Kind("digits", _INT, _INTS, "list the decimal digits of its absolute value", "[int(d) for d in str(abs(x))]"),
    _Kind("range", _INT, _INTS, "list the integers from 1 to its remainder modulo 9", "list(range(1, x % 9 + 1))"),
    _Kind("add", _INTS, _INTS, "add {n} to each number", "[v + {n} for v in x]", range(1, 10)),
    _Kind("multiply", _INTS, _INTS, "multiply each number by {n}", "[v * {n} for v in x]", range(2, 6)),
    _Kind("multiply", _INTS, _INTS, "negate each number", "[-v for v in x]"),
    _Kind("square", _INTS, _INTS, "square each number", "[v * v for v in x]"),
    _Kind("absolute", _INTS, _INTS, "replace each number by its absolute value", "[abs(v) for v in x]"),
    _Kind(
        "modulo",
        _INTS,
        _INTS,
        "replace each number by its remainder modulo {n} (from 0 to {n} - 1)",
        "[v % {n} for v in x]",
        range(3, 10),
    ),
    _Kind("order", _INTS, _INTS, "reverse the list", "x[::-1]"),
    _Kind("order", _INTS, _INTS, "sort the numbers, smallest first", "sorted(x)"),
    _Kind("order", _INTS, _INTS, "sort the numbers, largest first", "sorted(x, reverse=True)"),
    _Kind("order", _INTS, _INTS, "move the first number to the end", "x[1:] + x[:1]"),
    _Kind("unique", _INTS, _INTS, "keep only the first occurrence of each number", "list(dict.fromkeys(x))"),
    _Kind("parity", _INTS, _INTS, "keep only the even numbers", "[v for v in x if v % 2 == 0]"),
    _Kind("parity", _INTS, _INTS, "keep only the odd numbers", "[v for v in x if v % 2 == 1]"),
    _Kind("compare", _INTS, _INTS, "keep only the numbers larger than {n}", "[v for v in x if v > {n}]", range(10)),
    _Kind("compare", _INTS, _INTS, "keep only the numbers smaller than {n}", "[v for v in x if v < {n}]", range(3, 13)),
    _Kind("slice", _INTS, _INTS, "drop the first {n} numbers", "x[{n}:]", range(2, 4)),
    _Kind("slice", _INTS, _INTS, "keep only the first {n} numbers", "x[:{n}]", range(2, 5)),
    _Kind("slice", _INTS, _INTS, "keep every second number, starting with the first", "x[::2]"),
    _Kind(
        "sums",
        _INTS,
        _INTS,
        "replace each number by the sum of all numbers up to and including it",
        "[sum(x[: i + 1]) for i in range(len(x))]",
    ),
    _Kind(
        "sums",
        _INTS,
        _INTS,
        "list the differences between each number and the one before it",
        "[b - a for a, b in zip(x, x[1:])]",
    ),
    _Kind("fold", _INTS, _INT, "add up the numbers", "sum(x)"),
    _Kind("fold", _INTS, _INT, "count the numbers", "len(x)"),
    _Kind("fold", _INTS, _INT, "count the different numbers", "len(set(x))"),
    _Kind("fold", _INTS, _INT, "take the largest number, or 0 if there are no numbers", "max(x, default=0)"),
    _Kind("fold", _INTS, _INT, "take the smallest number, or 0 if there are no numbers", "min(x, default=0)"),
    _Kind("join", _INTS, _STR, "join the numbers in decimal, with a comma between them", '",".join(str(v) for v in x)'),
    _Kind("case", _STR, _STR, "convert it to upper case", "x.upper()"),
    _Kind("case", _STR, _STR, "convert it to lower case", "x.lower()"),
    _Kind("case", _STR, _STR, "swap upper and lower case", "x.swapcase()"),
    _Kind("order", _STR, _STR, "reverse it", "x[::-1]"),
    _Kind("order", _STR, _STR, "sort its characters by their codes", '"".join(sorted(x))'),
    _Kind("unique", _STR, _STR, "keep only the first occurrence of each character", '"".join(dict.fromkeys(x))'),
    _Kind(
        "vowels", _STR, _STR, "remove the vowels (aeiou and AEIOU)", '"".join(c for c in x if c not in "aeiouAEIOU")'
    ),
    _Kind("letters", _STR, _STR, "keep only the letters", '"".join(c for c in x if c.isalpha())'),
    _Kind("double", _STR, _STR, "append a copy of itself", "x + x"),
    _Kind("slice", _STR, _STR, "drop the first {n} characters", "x[{n}:]", range(2, 4)),
    _Kind("slice", _STR, _STR, "keep only the first {n} characters", "x[:{n}]", range(3, 7)),
    _Kind("slice", _STR, _STR, "keep every second character, starting with the first", "x[::2]"),
    _Kind("fold", _STR, _INT, "count its characters", "len(x)"),
    _Kind("fold", _STR, _INT, "count its different characters", "len(set(x))"),
    _Kind("fold", _STR, _INT, "count its vowels (aeiou and AEIOU)", 'sum(c in "aeiouAEIOU" for c in x)'),
    _Kind("codes", _STR, _INTS, "list the codes of its characters, as ord does", "[ord(c) for c in x]"),
    _Kind("split", _STR, _WORDS, "split it into words at white space", "x.split()"),
    _Kind("order", _WORDS, _WORDS, "reverse the order of the words", "x[::-1]"),
    _Kind("order", _WORDS, _WORDS, "sort the words by their character codes, as sorted does", "sorted(x)"),
    _Kind(
        "order",
        _WORDS,
        _WORDS,
        "sort the words by length; words of the same length keep their order",
        "sorted(x, key=len)",
    ),
    _Kind("mirror", _WORDS, _WORDS, "reverse each word", "[w[::-1] for w in x]"),
    _Kind("case", _WORDS, _WORDS, "convert each word to upper case", "[w.upper() for w in x]"),
    _Kind(
        "compare",
        _WORDS,
        _WORDS,
        "keep only the words with more than {n} characters",
        "[w for w in x if len(w) > {n}]",
        range(2, 5),
    ),
    _Kind("slice", _WORDS, _WORDS, "drop the first word", "x[1:]"),
    _Kind("fold", _WORDS, _INT, "count the words", "len(x)"),
    _Kind("fold", _WORDS, _INT, "add up the lengths of the words", "sum(len(w) for w in x)"),
    _Kind("lengths", _WORDS, _INTS, "list the lengths of the words", "[len(w) for w in x]"),
    _Kind("join", _WORDS, _STR, "join the words with a space between them", '" ".join(x)'),
    _Kind(
        "join",
        _WORDS,
        _STR,
        "take the first longest word, or the empty string if there are no words",
        'max(x, key=len, default="")',
    ),
    _Kind("join", _WORDS, _STR, "join the first characters of the words", '"".join(w[:1] for w in x)'),
)

KINDS = tuple(kind.operations() for kind in _KINDS)
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
