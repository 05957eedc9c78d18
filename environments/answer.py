r"""Answer parsing: find the moves, or a number, in the text of a language model.

The pair of tags ``<answer>up</answer>`` may appear anywhere, in upper or lower case, with white space around the move.
If a text has several pairs of tags, the first pair counts. If several opening tags precede a closing tag, the last of
these opening tags counts. A pair of tags without a move makes the answer unreadable. A text without tags, or the tags,
may write the move as ``\boxed{up}``; the last ``\boxed`` counts, since mathematical answers come at the end. A text
with neither must be the bare move, such as ``up``: a language model can thus answer in one token.

A number or a program whose form is unclear is no answer: a wrong reading must never be rewarded.

Parsing takes time linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

SEPARATOR = "||"
"""Separator between the moves of one answer (as in RAGEN)."""

_OPEN = "<answer>"
_CLOSE = "</answer>"
_BOXED = "\\boxed{"

Number: TypeAlias = Decimal | Fraction

_NUMBER = re.compile(
    r"([-+]?)[$€£¥]?((?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*)(?:\.[0-9]*)?|\.[0-9]+)(e[-+]?[0-9]{1,4})?(%?)"
)
_MAX_PART = 40
"""Maximum characters of the two parts of a fraction."""
_TOKEN = re.compile(r"[^\s=≈→⇒|]+")
_DIGIT = re.compile(r"[\d²³¹⁰-⁹¼-¾⅐-⅞]")
_LEFT = "()[]{}*_`\"'“”‘’:;,!?#$€£¥~"
_RIGHT = f"{_LEFT}."
_MINUS = str.maketrans(dict.fromkeys("−–‒‐‑﹣－", "-"))
_NEAR = 24
"""Characters before and after a number that may change its meaning."""
_WHOLE = re.compile(r"(?:^|[\s(=$])(-?[0-9]{1,9})[^\S\n]{1,3}$")
_OPERATOR = r"[-+*/×÷·^x±,;&]|\b(?:or|and|to|of|mod|times|plus|minus|over|by)\b"
_JOINED_BEFORE = re.compile(rf"(?:[\d)%][^\S\n]*(?:{_OPERATOR})|\d[^\S\n]|[-—]|\bmod)[^\S\n]*$")
_JOINED_AFTER = re.compile(r"[^\S\n]*(?:[\\π²³¹⁰-⁹¼-¾⅐-⅞±]|[+*/×÷·^]|-[^\S\n]*[a-z]\b)")
_SCALES = {"percent": -2, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Words after a number, and the powers of ten by which they multiply it."""
_SCALE = re.compile(rf"[^\S\n]*({'|'.join(_SCALES)})\b")
_REWRITES = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\\(?:text|textbf|mathrm|mathbf|mathit|mbox)\{([^{}]*)\}", r" \1 "),
        (r"(?<=[0-9])(?=\\[dt]?frac)", " "),
        (r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2"),
        (r"\{,\}", ","),
        (r"(?<=[0-9])\\[,!](?=[0-9]{3})", ""),
        (r"\\([%$])", r"\1"),
        (r"\\[,!;: ()\[\]]|\\(?:left|right)(?![a-z])|\^\{?\\circ\}?", " "),
        (r"(?<=[0-9])\s*(?:x|×|\*|·|\\times|\\cdot)\s*10\s*\^\s*[{(]?\s*([-+]?[0-9]{1,4})[})]?(?![0-9])", r"e\1"),
        (r"(?<=[0-9])\s+/\s+(?=[0-9])|(?<=[0-9])\s+(?:out\s+)?of\s+(?=[0-9])", "/"),
        (r"(?<=[^\W\d]):", ": "),
    )
)
"""Forms of numbers in LaTeX, powers of ten and fractions in words, and how they are written for `read_number`."""

_CONTAINER = re.compile(r"(?:> ?)*(?:[-*+]|[0-9]{1,9}[.)])?")


def parse_answer(text: str, moves: Collection[str]) -> str | None:
    """Return the move in `text`, or None if there is no move.

    Args:
        text: Any output of a model.
        moves: Names of the moves, in lower case.
    """
    word = answer_text(text).strip()
    return word if word in moves else None


def parse_answers(text: str, moves: Collection[str], most: int) -> tuple[str, ...]:
    """Return the moves in `text`, in order. If the answer contains anything but moves, the result is empty.

    Args:
        text: Any output of a model.
        moves: Names of the moves, in lower case.
        most: Maximum number of moves to return. Later moves are dropped, but must be valid.
    """
    words = [word.strip() for word in answer_text(text).split(SEPARATOR)]
    return tuple(words[:most]) if all(word in moves for word in words) else ()


def parse_number(text: str) -> Number | None:
    r"""Return the last number inside the answer tags or ``\boxed``; None without a number, or if its form is unclear.

    In a text without tags and ``\boxed``, the last number anywhere counts. Words that contain digits, such as ``x2``,
    are no numbers. See `read_number` for the forms. In the text, the number may also be ``\frac{3}{4}``, ``2 1/2``,
    ``3 of 5``, ``6.02 x 10^23`` or ``2 million``. The form is unclear if the number is part of an expression, a list, a
    range, a date or a version: in ``5-3``, ``1, 2`` and ``1.2.3`` there is no number, but in ``5-3 = 2`` there is 2.
    """
    text = answer_text(text).translate(_MINUS)
    for pattern, to in _REWRITES:
        text = pattern.sub(to, text)
    for token in reversed(list(_TOKEN.finditer(text))):
        word = token[0].lstrip(_LEFT).rstrip(_RIGHT)
        if _DIGIT.search(word) and not word[0].isalpha():
            return _in_context(word, text[max(0, token.start() - _NEAR) : token.start()], text[token.end() :][:_NEAR])
    return None


def _in_context(word: str, before: str, after: str) -> Number | None:
    """Return the number `word` between two texts; None if they change its meaning in an unknown way."""
    number = read_number(word)
    if number is None or _JOINED_AFTER.match(after):
        return None
    if scale := _SCALE.match(after):
        return None if isinstance(number, Fraction) else _scaled(number, _SCALES[scale[1]])
    whole = _WHOLE.search(before)
    if whole and isinstance(number, Fraction) and 0 < number < 1 and word[0] != "+":
        return Fraction(whole[1]) + (-number if whole[1].startswith("-") else number)
    return None if _JOINED_BEFORE.search(before) else number


def read_number(word: str) -> Number | None:
    """Return the number that a word is; None if it is anything else, or if its form is unclear.

    Forms are ``5``, ``-5``, ``+5``, ``.5``, ``5.``, ``007``, ``1e-1``, ``1,234.5``, ``1_234``, ``$3``, ``3/4``, and
    ``50%``, which is 0.5. A comma separates groups of three digits: ``1.234,5`` and ``3,14`` are unclear.
    """
    above, line, below = word.lower().translate(_MINUS).strip().partition("/")
    numbers = []
    for part in (above, below) if line else (above,):
        if (found := _NUMBER.fullmatch(part)) is None:
            return None
        sign, digits, power, percent = found.groups()
        number = Decimal(sign + re.sub("[,_]", "", digits) + (power or ""))
        numbers.append(_scaled(number, -2) if percent else number)
    if not line:
        return numbers[0]
    if max(len(above), len(below)) > _MAX_PART or {"e", "%"} & set(word.lower()) or numbers[1] <= 0:
        return None
    return Fraction(numbers[0]) / Fraction(numbers[1])


def _scaled(number: Decimal, power: int) -> Decimal:
    """Return the number times a power of ten, without rounding."""
    sign, digits, exponent = number.as_tuple()
    return Decimal((sign, digits, int(exponent) + power))


def answer_text(text: str) -> str:
    r"""Return what the answer tags or ``\boxed`` enclose, or else the whole text, in lower case."""
    text = text.lower()
    start = text.find(_OPEN)
    end = text.find(_CLOSE, start) if start >= 0 else -1
    if end >= 0:
        text = text[text.rfind(_OPEN, start, end) + len(_OPEN) : end]
    start = text.rfind(_BOXED, 0, text.rfind("}") + 1)
    if start < 0:
        return text
    text, depth = text[start + len(_BOXED) :], 1
    for at, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:at]
    return ""


def code_block(text: str, languages: Collection[str]) -> tuple[str, bool]:
    """Return the program in a model's answer, and whether it is in a block of one of the `languages`.

    The last such block counts; without one the last block, and without any block the whole text. Blocks are the fenced
    code blocks of CommonMark, whose language is the first word after the fence. A fence may also follow text on its
    line, and the closing one may end the last line of code.

    Args:
        text: Any output of a model.
        languages: Names of the language after the opening of a block, in lower case.
    """
    blocks = list(_blocks(text))
    found = [code for language, code in blocks if language in languages]
    if found:
        return found[-1], True
    return (blocks[-1][1] if blocks else text), False


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the code of each fenced block. A block without end ends with the text."""
    lines = iter(text.replace("\r\n", "\n").removesuffix("\n").split("\n"))
    for line in lines:
        if (opening := _fence(line)) is None:
            continue
        fence, info, indent, is_quoted = opening
        code: list[str] = []
        for inner in lines:
            if is_quoted:
                inner = re.sub(r"^ ?(?:> ?)+", "", inner)
            bare = inner.lstrip(" \t")
            inner = inner[min(indent, len(inner) - len(bare)) :]
            rest = inner.rstrip().rstrip(fence[0])
            if len(inner.rstrip()) - len(rest) >= len(fence):
                if rest.strip() and fence[0] == "`":
                    code.append(rest)
                    break
                if not rest.strip() and len(rest) < 4:
                    break
            code.append(inner)
        yield re.split(r"[\s:,}]", info.lstrip(" {.").lower())[0], "".join(f"{one}\n" for one in code)


def _fence(line: str) -> tuple[str, str, int, bool] | None:
    """Return the fence that opens a block in `line`, its info string, its indentation, and whether it is quoted."""
    bare = line.lstrip()
    if bare.startswith("~~~"):
        info = bare.lstrip("~")
        return bare[: len(bare) - len(info)], info, len(line) - len(bare), False
    head, tick, info = line.rpartition("`")
    before = (head + tick).rstrip("`")
    fence = (head + tick)[len(before) :]
    if len(fence) < 3 or "```" in before:
        return None
    bare = before.lstrip()
    if not _CONTAINER.fullmatch(bare.rstrip()):
        return (fence, info, len(before) - len(bare), False) if len(info.split()) <= 1 else None
    quoted = len(bare) - len(bare.lstrip("> "))
    return fence, info, len(bare) - quoted if quoted else len(before), quoted > 0
