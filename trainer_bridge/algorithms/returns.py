"""Returns, and their normalisation. A step of the decision process is a turn, not a token: the discount is per turn."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6
"""What is added to a deviation before it divides, and the largest relative difference between equal values."""


def discounted_returns(reward_ET: Tensor, turn_mask_ET: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted return from each turn onwards, G[t] = r[t] + gamma * G[t+1], in float64."""
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


def standardised(value_N: Tensor) -> Tensor:
    """Return (value - mean) / (deviation + 1e-6), or zeros if all values are equal; see `deviation`."""
    centred_N = value_N - value_N.mean() if len(value_N) else value_N
    found = deviation(value_N)
    return centred_N / (found + EPSILON) if found else value_N.new_zeros(value_N.shape)


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
