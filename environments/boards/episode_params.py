"""Numeric parameters of an episode, and their arrays for many episodes. Axes: N boards."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class BatchParams(NamedTuple):
    """The numeric parameters of an episode.

    Attributes:
        limit: Moves until the episode is truncated.
        slip: Chance that a move goes to one of its two sides instead.
        penalty: Amount subtracted from the reward of a turn with an unreadable answer.
        move: Reward of every move.
        progress: Reward of every wanted cell that becomes done, and cost of each that becomes wanted again.
        won: Reward of winning.
        unfinished: Reward when the moves run out, multiplied by the share of done cells among wanted and done ones.
        turn: Maximum moves of an answer.
        notices: Whether an unreadable answer causes a notice above the board.
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
    """The parameters of `BatchParams` as arrays: of shape [1], or [N] if the boards differ."""

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
    """The rewards among the parameters; see `BatchParams`."""

    move: float = 0.0
    progress: float = 0.0
    won: float = 1.0
    unfinished: float = 0.0


class Matters(NamedTuple):
    """Parameters with an effect on any board; `rewards` is false if winning pays 1 and nothing else pays per move."""

    rewards: bool
    slip: bool
    penalty: bool
    unfinished: bool


def matters_of(params: EpisodeParams) -> Matters:
    slip, penalty, unfinished = (bool(np.any(array)) for array in (params.slip, params.penalty, params.unfinished))
    rewards = bool(np.any(params.move) or np.any(params.progress) or np.any(params.won != 1))
    return Matters(rewards, slip, penalty, unfinished)


def as_arrays(params: BatchParams) -> EpisodeParams:
    """Return the parameters as one-element arrays: NumPy is faster with them than with scalars."""
    return EpisodeParams(*(np.array([value]) for value in params))


SIDES = {"up": ("right", "left"), "down": ("left", "right"), "left": ("up", "down"), "right": ("down", "up")}
"""The two sides of a move: the first for the lowest random numbers, the second for the highest, as in Gymnasium."""


def slipped(move: str, slip: float, chance: float) -> str:
    """Return the actual move: the first side below ``slip / 2``, the second from ``1 - slip / 2``, else `move`."""
    if chance < slip / 2:
        return SIDES[move][0]
    return SIDES[move][1] if chance >= 1 - slip / 2 else move
