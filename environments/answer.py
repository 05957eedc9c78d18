r"""Answer parsing: find the moves, or a number, in the text of a language model.

``<answer>up</answer>`` may stand anywhere, in upper or lower case, with white space around the move. Of several closed
pairs the first counts; of several opening tags before one closing tag the last counts. If the pair holds no move, the
answer is unreadable. A text without a pair may give its move as ``\boxed{up}``; the last ``\boxed`` counts, since
mathematical answers come at the end. A text without either must be the bare move, ``up``, so that a language model can
answer in one token.

The number of passes over the text is fixed, whatever the text contains.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from decimal import Decimal

SEPARATOR = "||"
"""Separates the moves of an answer with several moves (as in RAGEN)."""

_OPEN = "<answer>"
_CLOSE = "</answer>"
_BOXED = "\\boxed{"
_NUMBER = re.compile(r"(?:(?<![0-9])[-−])?[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?")


def parse_answer(text: str, moves: Collection[str]) -> str | None:
    """Return the move in `text`, or None if there is no move.

    Args:
        text: Any output of a model.
        moves: Names of the moves, in lower case.
    """
    word = _answer(text.lower()).strip()
    return word if word in moves else None


def parse_answers(text: str, moves: Collection[str], most: int) -> tuple[str, ...]:
    """Return the moves in `text`, in order; empty if there are no moves, or if the answer contains anything else.

    Args:
        text: Any output of a model.
        moves: Names of the moves, in lower case.
        most: Maximum number of moves to return. Later words are dropped, but they must be valid moves, too.
    """
    words = [word.strip() for word in _answer(text.lower()).split(SEPARATOR)]
    return tuple(words[:most]) if all(word in moves for word in words) else ()


def parse_number(text: str) -> Decimal | None:
    r"""Return the last number in the answer tags or ``\boxed``, or in the whole `text` without them; None without one.

    A number is an optional minus sign (``-`` or ``−``), digits, which commas may group in threes, and an optional
    decimal part. A minus sign right after a digit is a subtraction.
    """
    numbers = _NUMBER.findall(_answer(text.lower()))
    return Decimal(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


def _answer(text: str) -> str:
    r"""Return the content of the answer tags or of ``\boxed``; the whole text without them. `text` is in lower case."""
    start = text.find(_OPEN)
    end = text.find(_CLOSE, start) if start >= 0 else -1
    if end >= 0:
        return text[text.rfind(_OPEN, start, end) + len(_OPEN) : end]
    start = text.rfind(_BOXED, 0, text.rfind("}") + 1)
    return text if start < 0 else text[start + len(_BOXED) : text.find("}", start)]
