"""Returns, their normalisation, and generalised advantage estimates.

Axes: E episodes, T turns, S steps (padded), N policy tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from envkit.types import StopReason

if TYPE_CHECKING:
    from .parts import Rollouts, Tensor

EPSILON = 1e-6
"""What is added to a deviation before it divides, and the largest relative difference between equal values."""

_CUTS = frozenset({StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.CONTEXT_OVERFLOW, StopReason.PLAYER_TIMEOUT})
"""Endings by a limit."""


class Steps(NamedTuple):
    """The steps of each episode in order, without gaps: its turns that have policy tokens, or these tokens.

    Attributes:
        rollout_N: The episode of each token.
        place_N: The number of its step in the episode.
        mask_ES: 1 for steps, 0 for padding, in float64.
    """

    rollout_N: Tensor
    place_N: Tensor
    mask_ES: Tensor

    def total(self, value_N: Tensor) -> Tensor:
        """Return the sum over the tokens of each step [E, S], in float64."""
        zero_ES = self.mask_ES.new_zeros(self.mask_ES.shape)
        return zero_ES.index_put((self.rollout_N, self.place_N), value_N.double(), accumulate=True)

    def of(self, value_N: Tensor) -> Tensor:
        """Return the value of each step [E, S], which all its tokens have, in float64."""
        zero_ES = self.mask_ES.new_zeros(self.mask_ES.shape)
        return zero_ES.index_put((self.rollout_N, self.place_N), value_N.double())

    def spread(self, value_ES: Tensor) -> Tensor:
        """Return a value for each token [N]: that of its step."""
        return value_ES[self.rollout_N, self.place_N]


def steps_of(rollouts: Rollouts, unit: Literal["turn", "token"]) -> Steps:
    """Return the steps of the episodes. Their order is that of turns and tokens, whatever the order of the samples."""
    segments, (episodes, turns) = rollouts.segments, rollouts.turn_mask_ET.shape
    key_N = segments.rollout_N * turns + segments.turn_N
    if unit == "turn":
        rank_N = (key_N.bincount() > 0).cumsum(0)[key_N] - 1
    else:
        rank_N = key_N.argsort(stable=True).argsort()
    start_E = rank_N.new_full((episodes,), len(rank_N)).scatter_reduce(0, segments.rollout_N, rank_N, "amin")
    place_N = rank_N - start_E[segments.rollout_N]
    length = int(place_N.max()) + 1 if len(place_N) else 1
    mask_ES = rollouts.reward_ET.new_zeros(episodes, length).double()
    mask_ES[segments.rollout_N, place_N] = 1.0
    return Steps(segments.rollout_N, place_N, mask_ES)


def by_turn(rollouts: Rollouts, value_N: Tensor) -> Tensor:
    """Return the value of each turn [E, T], which all its tokens have; 0 for turns without policy tokens."""
    zero_ET = value_N.new_zeros(rollouts.turn_mask_ET.shape)
    return zero_ET.index_put((rollouts.segments.rollout_N, rollouts.segments.turn_N), value_N)


def gae_of(
    reward_ES: Tensor,
    value_ES: Tensor,
    mask_ES: Tensor,
    after_E: Tensor,
    stops: Sequence[StopReason | None] = (),
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Return generalised advantage estimates [E, S], in float64; `envkit.trainer_bridge.algorithms.advantages.gae` has
    the formula.

    The value after the last step is 0; if a limit ended an episode of `stops`, it is `after_E`.
    """
    following_E = value_ES.new_zeros(len(value_ES))  # the value after the last step
    if stops:
        following_E = after_E * after_E.new_tensor([stop in _CUTS for stop in stops])
    advantage_ES, advantage_E = value_ES.new_zeros(value_ES.shape), value_ES.new_zeros(len(value_ES))
    for step in reversed(range(value_ES.shape[1])):
        exists_E = mask_ES[:, step]
        delta_E = reward_ES[:, step] + gamma * following_E - value_ES[:, step]
        advantage_E = (delta_E + gamma * gae_lambda * advantage_E) * exists_E
        following_E = exists_E * value_ES[:, step] + (1 - exists_E) * following_E
        advantage_ES[:, step] = advantage_E
    return advantage_ES


def discounted_returns(reward_ET: Tensor, turn_mask_ET: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted return from each turn, or step, onwards, G[t] = r[t] + gamma * G[t+1], in float64."""
    reward_ET = (reward_ET * turn_mask_ET).double()
    return_ET = reward_ET.clone()
    for turn in reversed(range(reward_ET.shape[1] - 1)):
        return_ET[:, turn] += gamma * return_ET[:, turn + 1]
    return return_ET * turn_mask_ET


def normalised(value_ET: Tensor, turn_mask_ET: Tensor) -> Tensor:
    """Normalise all values except the padding to mean 0 and standard deviation 1; equal values become 0."""
    is_turn_ET = turn_mask_ET > 0
    normalised_ET = value_ET.new_zeros(value_ET.shape).float()
    normalised_ET[is_turn_ET] = standardised(value_ET[is_turn_ET].double()).float()
    return normalised_ET


def standardised(value_N: Tensor, *, divides: bool = True) -> Tensor:
    """Return (value - mean) / (deviation + 1e-6), or value - mean unless `divides`; zeros if all values are equal (see
    `deviation`).
    """
    found = deviation(value_N)
    if not found:
        return value_N.new_zeros(value_N.shape)
    centred_N = value_N - value_N.mean()
    return centred_N / (found + EPSILON) if divides else centred_N


def standardised_by(value_N: Tensor, keys: Iterable[Hashable], *, divides: bool = True) -> Tensor:
    """Return `standardised` values, each among those with the same key; a value alone becomes 0."""
    result_N = value_N.new_zeros(value_N.shape)
    for rows in rows_by(keys):
        result_N[rows] = standardised(value_N[rows], divides=divides)
    return result_N


def deviation(value_N: Tensor) -> float:
    """Return the standard deviation of a sample (with n - 1); 0 if the values are equal but for rounding errors."""
    if len(value_N) < 2 or not value_N.max() - value_N.min() > EPSILON * value_N.mean().abs().clamp(min=1.0):
        return 0.0
    return float(value_N.std())


def rows_by(keys: Iterable[Hashable]) -> list[list[int]]:
    """Return the indices of equal keys, in the order of their first occurrence."""
    rows_of: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        rows_of.setdefault(key, []).append(row)
    return [*rows_of.values()]
