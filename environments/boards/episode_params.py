"""Numeric parameters of an episode, and the direction of slips."""

from __future__ import annotations

from typing import NamedTuple


class EpisodeParams(NamedTuple):
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


class Rewards(NamedTuple):
    """The parameters of `EpisodeParams` that are rewards."""

    move: float = 0.0
    progress: float = 0.0
    won: float = 1.0
    unfinished: float = 0.0


SIDES = {"up": ("right", "left"), "down": ("left", "right"), "left": ("up", "down"), "right": ("down", "up")}
"""For each move, the two directions of a slip. As in Gymnasium, low random numbers select the first direction."""


def slipped(move: str, slip: float, chance: float) -> str:
    """Return the direction in which the player goes after choosing `move`, given a random number `chance`.

    The result is the first of ``SIDES[move]`` for a `chance` below ``slip / 2``, the second from ``1 - slip / 2``.
    """
    if chance < slip / 2:
        return SIDES[move][0]
    return SIDES[move][1] if chance >= 1 - slip / 2 else move
