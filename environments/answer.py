r"""Answers: finding the move in what a language model wrote.

``<answer>up</answer>`` counts wherever it stands, in any case, with any white space around the move. Of several closed
pairs the first counts, and of several openings before one closing the last. A pair that does not hold a move is
unreadable, whatever else the text says. Only a text without a pair may give its move as ``\boxed{up}``; there the
last box counts, since that is where mathematical answers end.
"""

from __future__ import annotations

from collections.abc import Collection

_OPEN = "<answer>"
_CLOSE = "</answer>"
_BOX = "\\boxed{"


def parse_answer(text: str, moves: Collection[str]) -> str | None:
    """Return the move that `text` names, or None when it names none.

    The work is a fixed number of passes over the text, whatever it holds.

    Args:
        text: Anything a model can write.
        moves: Names of the moves, in lower case.
    """
    text = text.lower()
    start = text.find(_OPEN)
    end = text.find(_CLOSE, start) if start >= 0 else -1
    if end >= 0:
        start = text.rfind(_OPEN, start, end) + len(_OPEN)
    else:
        box = text.rfind(_BOX, 0, text.rfind("}") + 1)
        if box < 0:
            return None
        start = box + len(_BOX)
        end = text.find("}", start)
    word = text[start:end].strip()
    return word if word in moves else None
