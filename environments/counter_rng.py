"""Counter-based random numbers: a pure function of a seed and a count, for single values and for arrays.

For example, number 7 of a seed is the same in every process and in any order of calls. SplitMix64 spreads a seed over
64 bits (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). These bits determine the
start and the odd stride of a counter. The hash "lowbias32" of Wellons' hash prospector
(github.com/skeeto/hash-prospector) mixes the counter's value. The numbers have only 32 bits, for speed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_FIRST_32 = 0x7FEB352D
_SECOND_32 = 0x846CA68B
_BITS = (1 << 64) - 1
_BITS_32 = (1 << 32) - 1
_UNIT = 2.0**-32
# These are one-element arrays because NumPy is faster with them than with scalars.
_FIRST_1, _SECOND_1, _15_1, _16_1 = (np.array([constant], np.uint32) for constant in (_FIRST_32, _SECOND_32, 15, 16))


def spread(seed: int) -> int:
    """Return 64 well-mixed bits from the lowest 64 bits of `seed`."""
    z = seed + _GOLDEN & _BITS
    z = (z ^ z >> 30) * _FIRST & _BITS
    z = (z ^ z >> 27) * _SECOND & _BITS
    return z ^ z >> 31


def spread_B(seed_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `spread` of each seed in an array."""
    z_B = seed_B + np.uint64(_GOLDEN)
    z_B ^= z_B >> np.uint64(30)
    z_B *= np.uint64(_FIRST)
    z_B ^= z_B >> np.uint64(27)
    z_B *= np.uint64(_SECOND)
    z_B ^= z_B >> np.uint64(31)
    return z_B


def episode_seed(first: int, episode: int) -> int:
    """Return the seed of episode number `episode` after a reset with seed `first`; episode 0 has the seed `first`."""
    return first if episode == 0 else spread(spread(first) + episode * _GOLDEN) >> 33


def episode_seed_B(first_B: NDArray[np.uint64], episode_B: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return `episode_seed` for arrays. `first_B` must contain ``spread(first)``; episode numbers must be above 0."""
    z_B = spread_B(episode_B.astype(np.uint64) * np.uint64(_GOLDEN) + first_B)
    z_B >>= np.uint64(33)
    return z_B


def chance(seed: int, count: int) -> float:
    """Return random number `count` of `seed`, in [0, 1)."""
    bits = spread(seed)
    z = (bits >> 32) + count * (bits | 1) & _BITS_32
    z = (z ^ z >> 16) * _FIRST_32 & _BITS_32
    z = (z ^ z >> 15) * _SECOND_32 & _BITS_32
    return (z ^ z >> 16) * _UNIT


def chances_of_B(spread_B: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the start and the stride of each seed's counter. `spread_B` must contain ``spread(seed)`` of each seed."""
    return (spread_B >> np.uint64(32)).astype(np.uint32), (spread_B | np.uint64(1)).astype(np.uint32)


def chance_B(
    first_B: NDArray[np.uint32], stride_B: NDArray[np.uint32], count_B: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """Return ``chance(seed, count) * 2**32`` for each pair. `chances_of_B` returns the first two arguments."""
    z_B = count_B * stride_B
    z_B += first_B
    z_B ^= z_B >> _16_1
    z_B *= _FIRST_1
    z_B ^= z_B >> _15_1
    z_B *= _SECOND_1
    z_B ^= z_B >> _16_1
    return z_B
