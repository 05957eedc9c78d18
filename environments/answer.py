r"""Answer parsing: find the moves, or a number, in the text of a language model.

The pair of tags ``<answer>up</answer>`` may appear anywhere, in upper or lower case, with white space around the move.
If a text has several pairs of tags, the first pair counts. If several opening tags precede a closing tag, the last of
these opening tags counts. A pair of tags without a move makes the answer unreadable. A text without tags may write its
move as ``\boxed{up}``; the last ``\boxed`` counts, since mathematical answers come at the end. A text with neither must
be the bare move, such as ``up``: a language model can thus answer in one token.

Parsing takes time linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from decimal import Decimal

SEPARATOR = "||"
"""Separator between the moves of one answer (as in RAGEN)."""

_OPEN = "<answer>"
_CLOSE = "</answer>"
_BOXED = "\\boxed{"
_BLOCK = re.compile(r"^ *```([^\n`]*)\n(.*?)(?:^ *```|\Z)", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"(?:(?<![0-9])[-−])?[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?")


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


def parse_number(text: str) -> Decimal | None:
    r"""Return the last number inside the answer tags or ``\boxed``; None if there is no number.

    In a text without tags and ``\boxed``, the last number anywhere counts. A number consists of an optional minus sign
    (``-`` or ``−``), digits, and an optional decimal part. Commas may separate groups of three digits. A minus sign
    directly after a digit is read as a subtraction, not as a sign.
    """
    numbers = _NUMBER.findall(answer_text(text))
    return Decimal(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


def answer_text(text: str) -> str:
    r"""Return what the answer tags or ``\boxed`` enclose, or else the whole text, in lower case."""
    text = text.lower()
    start = text.find(_OPEN)
    end = text.find(_CLOSE, start) if start >= 0 else -1
    if end >= 0:
        return text[text.rfind(_OPEN, start, end) + len(_OPEN) : end]
    start = text.rfind(_BOXED, 0, text.rfind("}") + 1)
    return text if start < 0 else text[start + len(_BOXED) : text.find("}", start)]


def code_block(text: str, languages: Collection[str]) -> tuple[str, bool]:
    """Return the program in a model's answer, and whether it is in a block of one of the `languages`.

    The last such block counts; without one the last block, and without any block the whole text.

    Args:
        text: Any output of a model.
        languages: Names of the language after the opening of a block, in lower case.
    """
    blocks = [(tag.strip().lower(), code) for tag, code in _BLOCK.findall(text)]
    found = [code for tag, code in blocks if tag in languages]
    if found:
        return found[-1], True
    return (blocks[-1][1] if blocks else text), False
