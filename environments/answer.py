r"""Answers: finding the moves in what a language model wrote.

``<answer>up</answer>`` counts wherever it stands, in any case, with any white space around the move. Of several closed
pairs the first counts, and of several openings before one closing the last. A pair that does not hold a move is
unreadable, whatever else the text says. Only a text without a pair may give its move as ``\boxed{up}``; there the
last box counts, since that is where mathematical answers end.

All work is a fixed number of passes over the text, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Collection

SEPARATOR = "||"
"""Stands between the moves of an answer that holds several (as in RAGEN)."""

_OPEN = "<answer>"
_CLOSE = "</answer>"
_BOX = "\\boxed{"


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


def _answer(text: str) -> str:
    """Return what the answer's mark holds; empty when there is none. `text` is in lower case."""
    start = text.find(_OPEN)
    end = text.find(_CLOSE, start) if start >= 0 else -1
    if end >= 0:
        return text[text.rfind(_OPEN, start, end) + len(_OPEN) : end]
    box = text.rfind(_BOX, 0, text.rfind("}") + 1)
    return "" if box < 0 else text[box + len(_BOX) : text.find("}", box)]
