"""Numeric parameters of one episode, and the same parameters as arrays for many boards. Axis: N boards."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class BatchParams(NamedTuple):
    """The numeric parameters of an episode.

    Attributes:
        limit: Moves until the episode is truncated.
        slip: Chance that the player slips to the left or right of the chosen direction.
        penalty: Amount subtracted from the reward for an unreadable answer.
        move: Reward of every move.
        progress: Reward for each goal that is completed. The same amount is subtracted for each goal that is undone.
        won: Reward of winning.
        unfinished: Reward when the moves run out, multiplied by the share of goals that are done.
        turn: Maximum moves per answer.
        notices: Whether the observation after an unreadable answer starts with a notice.
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
    """`BatchParams` as arrays: of shape [1] if all boards have the same parameters, otherwise of shape [N]."""

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
    """The parameters of `BatchParams` that are rewards."""

    move: float = 0.0
    progress: float = 0.0
    won: float = 1.0
    unfinished: float = 0.0


class Matters(NamedTuple):
    """Whether each effect occurs on at least one board. The vector environment skips effects that occur nowhere.

    `rewards` is false if the reward is 1 for winning and 0 for all other moves.
    """

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
"""For each move, the two directions of a slip. As in Gymnasium, low random numbers select the first direction."""


def slipped(move: str, slip: float, chance: float) -> str:
    """Return the direction in which the player goes after choosing `move`, given a random number `chance`.

    The result is the first of ``SIDES[move]`` for a `chance` below ``slip / 2``, the second from ``1 - slip / 2``.
    """
    if chance < slip / 2:
        return SIDES[move][0]
    return SIDES[move][1] if chance >= 1 - slip / 2 else move
