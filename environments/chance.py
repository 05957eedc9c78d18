"""Chances: numbers that follow from a seed and a count, the same one at a time and in arrays.

The mixing is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Whoever
asks for number 7 of a seed gets the same answer whatever was asked before, in any process, alone or among a thousand.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_BITS = (1 << 64) - 1
_UNIT = 2.0**-53


def follow(seed: int, count: int) -> int:
    """Return number `count` of `seed`, 64 bits.

    Args:
        seed: Any integer; only its lowest 64 bits matter.
        count: Any integer from 0.
    """
    return _mix(_mix(seed & _BITS) + count * _GOLDEN & _BITS)


def chance(seed: int, count: int) -> float:
    """Return number `count` of `seed` as a float in [0, 1)."""
    return (follow(seed, count) >> 11) * _UNIT


def stream_B(seed_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return what `follow_B` and `chance_B` make the numbers of the seeds from."""
    return _mixed_B(seed_B.copy())


def follow_B(stream_B: NDArray[np.uint64], count_B: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`follow` for arrays, with the streams of the seeds."""
    return _mixed_B(count_B.astype(np.uint64) * np.uint64(_GOLDEN) + stream_B)


def chance_B(stream_B: NDArray[np.uint64], count_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """`chance` for arrays, with the streams of the seeds."""
    z_B = follow_B(stream_B, count_B)
    z_B >>= np.uint64(11)
    return z_B * _UNIT


def episode_seed(first: int, episode: int) -> int:
    """Return the seed of episode number `episode` after a reset with seed `first`, which is that of number 0."""
    return first if episode == 0 else follow(first, episode) >> 33


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * _FIRST & _BITS
    z = (z ^ z >> 27) * _SECOND & _BITS
    return z ^ z >> 31


def _mixed_B(z_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` in place."""
    z_B ^= z_B >> np.uint64(30)
    z_B *= np.uint64(_FIRST)
    z_B ^= z_B >> np.uint64(27)
    z_B *= np.uint64(_SECOND)
    z_B ^= z_B >> np.uint64(31)
    return z_B
