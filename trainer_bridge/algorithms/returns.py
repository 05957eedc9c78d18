"""Returns, and their normalisation. A step of the decision process is a turn, not a token: the discount is per turn."""

from __future__ import annotations

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
    """Normalise all values except the padding to mean 0 and population standard deviation 1; equal values become 0."""
    is_turn_ET = turn_mask_ET > 0
    normalised_ET = value_ET.new_zeros(value_ET.shape).float()
    normalised_ET[is_turn_ET] = standardised(value_ET[is_turn_ET].double(), correction=0).float()
    return normalised_ET


def standardised(value_N: Tensor, *, correction: int) -> Tensor:
    """Return (value - mean) / (std + 1e-6), or zeros if the values are equal but for rounding errors.

    Args:
        value_N: The values, in float64.
        correction: 1 for the unbiased standard deviation, 0 for that of the population.
    """
    if not len(value_N) or not bool(value_N.max() - value_N.min() > EPSILON * value_N.mean().abs().clamp(min=1.0)):
        return value_N.new_zeros(value_N.shape)
    return (value_N - value_N.mean()) / (value_N.std(correction=correction) + EPSILON)
