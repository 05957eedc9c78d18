"""Terms: the numbers that an episode is played by, and what they come to for many episodes at once. Axes: N boards."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class BatchParams(NamedTuple):
    """The numbers that an episode is played by.

    Attributes:
        limit: Moves until it is truncated.
        slip: Chance that a move goes to one of its two sides instead.
        penalty: Subtracted from the reward of a turn whose answer cannot be read.
        move: Reward of every move.
        progress: Reward of every wanted cell that is gone, and cost of each that comes back.
        won: Reward of winning.
        unfinished: Times the share that is done of all that is wanted or done: reward when the moves run out.
        turn: Moves that one answer may hold.
        notices: Whether an answer that cannot be read is told so.
    """

    limit: int
    slip: float
    penalty: float
    move: float
    progress: float
    won: float
    unfinished: float
    turn: int
    notices: bool


class EpisodeParams(NamedTuple):
    """The same for many boards, see `BatchParams`: of shape [1], or [N] for boards that differ."""

    limit: NDArray[Any]
    slip: NDArray[Any]
    penalty: NDArray[Any]
    move: NDArray[Any]
    progress: NDArray[Any]
    won: NDArray[Any]
    unfinished: NDArray[Any]
    turn: NDArray[Any]
    notices: NDArray[Any]


class Rewards(NamedTuple):
    """See `BatchParams`."""

    move: float = 0.0
    progress: float = 0.0
    won: float = 1.0
    unfinished: float = 0.0


class Matters(NamedTuple):
    """Which of the terms have an effect in any row; `rewards` says whether any but 1 for winning is paid at once."""

    rewards: bool
    slip: bool
    penalty: bool
    unfinished: bool


def matters_of(terms: EpisodeParams) -> Matters:
    slip, penalty, unfinished = (bool(np.any(term)) for term in (terms.slip, terms.penalty, terms.unfinished))
    rewards = bool(np.any(terms.move) or np.any(terms.progress) or np.any(terms.won != 1))
    return Matters(rewards, slip, penalty, unfinished)


def as_arrays(terms: BatchParams) -> EpisodeParams:
    """Return the terms as arrays of one each: NumPy is quicker with them than with numbers."""
    return EpisodeParams(*(np.array([term]) for term in terms))


SIDES = {"up": ("right", "left"), "down": ("left", "right"), "left": ("up", "down"), "right": ("down", "up")}
"""Where a move goes that slips, for the lowest and for the highest numbers (the order of Gymnasium's FrozenLake)."""


def slipped(move: str, slip: float, chance: float) -> str:
    """Return where `move` goes: to its first side below ``slip / 2``, to its second from ``1 - slip / 2``."""
    if chance < slip / 2:
        return SIDES[move][0]
    return SIDES[move][1] if chance >= 1 - slip / 2 else move
