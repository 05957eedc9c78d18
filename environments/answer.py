r"""Answers: finding the moves, or a number, in what a language model wrote.

``<answer>up</answer>`` counts wherever it stands, in any case, with any white space around the move. Of several closed
pairs the first counts, and of several openings before one closing the last. A pair that does not hold a move is
unreadable, whatever else the text says. Only a text without a pair may give its move as ``\boxed{up}``; there the
last box counts, since that is where mathematical answers end. A text without either counts if it is nothing but the
move, ``up``, so that a language model can answer in one token.

All work is a fixed number of passes over the text, whatever it holds.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from decimal import Decimal

SEPARATOR = "||"
"""Stands between the moves of an answer that holds several (as in RAGEN)."""

_OPEN = "<answer>"
_CLOSE = "</answer>"
_BOX = "\\boxed{"
_NUMBER = re.compile(r"(?:(?<![0-9])[-−])?[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?")


def parse_answer(text: str, moves: Collection[str]) -> str | None:
    """Return the move that `text` names, or None when it names none.

    Args:
        text: Anything a model can write.
        moves: Names of the moves, in lower case.
    """
    word = _answer(text.lower()).strip()
    return word if word in moves else None


def parse_answers(text: str, moves: Collection[str], most: int) -> tuple[str, ...]:
    """Return the moves that `text` names, in order; empty when it names none, or anything else beside them.

    Args:
        text: Anything a model can write.
        moves: Names of the moves, in lower case.
        most: How many moves count. Those after them are not played, yet have to be moves, too.
    """
    words = [word.strip() for word in _answer(text.lower()).split(SEPARATOR)]
    return tuple(words[:most]) if all(word in moves for word in words) else ()


def parse_number(text: str) -> Decimal | None:
    """Return the last number in the answer tags or box, or in the whole `text` without them; None if there is none.

    A number is an optional minus sign (``-`` or ``−``), digits, which commas may group in threes, and an optional
    decimal part. A minus sign right after a digit is a subtraction.
    """
    numbers = _NUMBER.findall(_answer(text.lower()))
    return Decimal(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


def _answer(text: str) -> str:
    """Return what the answer tags or the box hold; the whole text without them. `text` is in lower case."""
    start = text.find(_OPEN)
    end = text.find(_CLOSE, start) if start >= 0 else -1
    if end >= 0:
        return text[text.rfind(_OPEN, start, end) + len(_OPEN) : end]
    box = text.rfind(_BOX, 0, text.rfind("}") + 1)
    return text if box < 0 else text[box + len(_BOX) : text.find("}", box)]
