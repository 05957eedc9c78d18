"""Decoding of actions into moves. Axes of arrays: N boards, T moves of a turn (one answer per board)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envkit.errors import UsageError

from ..answer import parse_answer, parse_answers
from ..board import MOVES
from .physics import STAY

_SHORT = 64
"""Maximum length in characters of a cached answer. Only short answers, without reasoning, are likely to recur."""


def read_answer(answer: Any, most: int) -> tuple[str, ...]:
    """Return the first `most` moves in a text; empty if the text is unreadable.

    Raises:
        UsageError: The answer is not a string.
    """
    if not isinstance(answer, str):
        raise UsageError(f"an action must be text, got {answer!r}; make(..., action='index') takes numbers")
    return _read_one(answer) if most == 1 else parse_answers(answer, MOVES, most)


def read_index(number: Any) -> tuple[str, ...]:
    """Return a tuple with the move whose index is `number`, or an empty tuple if the index is out of range.

    Raises:
        UsageError: `number` is not an integer.
    """
    try:
        action = index(number)  # also accepts a zero-dimensional array
    except TypeError:
        raise UsageError(
            f"an action must be an integer, got {number!r}; make(..., action='text') takes answers"
        ) from None
    return (MOVES[action],) if 0 <= action < len(MOVES) else ()


def read_answers(answers: Sequence[Any], most: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the indices of the first `most` moves in each text [N, T], and whether each text is readable [N].

    The indices are padded with -1. An unreadable answer counts as one move that does nothing.

    Raises:
        UsageError: An answer is not a string.
    """
    try:
        if most == 1:
            action_N = np.array([_NUMBERS[_read_one(answer)] for answer in answers], np.int64)
            return action_N[:, None], action_N != STAY
        turns = [read_answer(answer, most) for answer in answers]
    except (TypeError, AttributeError):
        raise UsageError("actions must be strings; make_vec(..., action='index') takes numbers") from None
    action_NT = np.full((len(turns), max(1, *map(len, turns), 1)), -1)
    valid_N = np.array([turn != () for turn in turns])
    action_NT[~valid_N, 0] = STAY
    for row, turn in enumerate(turns):
        action_NT[row, : len(turn)] = [MOVES.index(move) for move in turn]
    return action_NT, valid_N


def read_indices(numbers: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the given indices of moves [N, 1], with `STAY` in place of invalid ones, and whether each is valid [N].

    Raises:
        UsageError: The actions are not N integers.
    """
    try:
        index_N = np.asarray(numbers)
    except ValueError:  # rows of different lengths
        raise UsageError("actions must be integers, one for each copy") from None
    if index_N.ndim != 1 or index_N.dtype.kind not in "iu":
        raise UsageError(f"actions must be integers, one for each copy, got {index_N.dtype} {index_N.shape}")
    action_N = index_N.astype(np.int64)
    valid_N = action_N.view(np.uint64) < _STAY_1  # Read as unsigned, a negative number is also too large.
    if np.count_nonzero(valid_N) < len(valid_N):
        action_N[~valid_N] = STAY
    return action_N[:, None], valid_N


def _read_one(answer: str) -> tuple[str, ...]:
    return _read_short(answer) if len(answer) <= _SHORT else _read(answer)


def _read(answer: str) -> tuple[str, ...]:
    move = parse_answer(answer, MOVES)
    return () if move is None else (move,)


_read_short = lru_cache(maxsize=4096)(_read)
_NUMBERS: Mapping[tuple[str, ...], int] = {(): STAY, **{(move,): number for number, move in enumerate(MOVES)}}
_STAY_1 = np.array([STAY], np.uint64)
