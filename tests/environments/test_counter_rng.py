"""Counter-based random numbers, from a seed and a count. Axes: B numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envkit.environments.counter_rng import (
    chance,
    chance_B,
    chances_of_B,
    episode_seed,
    episode_seed_B,
    spread,
    spread_B,
)

EXTREME = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, 2**70 + 1]
COUNTS = [0, 1, 2, 1000, 2**31, 2**32 - 1]
SEEDS = [*EXTREME, *np.random.default_rng(1).integers(0, 2**63, 200).tolist()]


def _cut(seeds: list[int]) -> NDArray[np.uint64]:
    """Return the lowest 64 bits of the seeds, which are all that count."""
    return np.array([seed % 2**64 for seed in seeds], np.uint64)


def _chances(seeds: NDArray[np.uint64], counts: NDArray[np.uint32]) -> NDArray[np.float64]:
    chance_32_B = chance_B(*chances_of_B(spread_B(seeds)), counts)
    assert chance_32_B.dtype == np.uint32
    return chance_32_B / 2.0**32


def test_arrays_hold_the_same_numbers_as_one_at_a_time() -> None:
    assert spread_B(_cut(SEEDS)).tolist() == [spread(seed) for seed in SEEDS]
    for count in COUNTS:
        counts = np.full(len(SEEDS), count, np.uint32)
        assert _chances(_cut(SEEDS), counts).tolist() == [chance(seed, count) for seed in SEEDS]
    some = np.random.default_rng(2).integers(0, 2**32, 1000, np.uint32)
    for seed in EXTREME:
        assert _chances(np.repeat(_cut([seed]), 1000), some).tolist() == [
            chance(seed, count) for count in some.tolist()
        ]


def test_arrays_are_left_as_they_are() -> None:
    seeds, counts = np.arange(50, dtype=np.uint64), np.arange(50, dtype=np.uint32)
    spread_B(seeds)
    chances_of_B(seeds)
    chance_B(counts, counts, counts)
    episode_seed_B(seeds, counts.astype(np.int64))
    assert seeds.tolist() == counts.tolist() == list(range(50))


def test_numbers_never_change() -> None:
    # Pinned: recorded episodes on slippery ice, and those that follow the first one, hang on them.
    assert [round(chance(7, count) * 2**32) for count in range(3)] == [4_174_095_649, 203_832_806, 2_393_573_509]
    assert [episode_seed(7, episode) for episode in range(3)] == [7, 1_395_229_438, 1_179_772_379]


def test_seeds_are_spread_as_splitmix_does() -> None:
    # The first numbers of SplitMix64 from the seed 0, as the literature gives them.
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [spread(0x9E3779B97F4A7C15 * number) for number in range(4)] == known


def test_a_reset_with_a_seed_starts_a_sequence_of_seeds() -> None:
    assert [episode_seed(seed, 0) for seed in EXTREME] == EXTREME
    assert all(0 <= episode_seed(seed, episode) < 2**31 for seed in EXTREME for episode in range(1, 50))


def test_episodes_of_arrays_have_the_seeds_of_single_ones() -> None:
    for episode in (1, 2, 3, 1000, 2**31, 2**40):
        array = episode_seed_B(spread_B(_cut(SEEDS)), np.full(len(SEEDS), episode))
        assert array.tolist() == [episode_seed(seed, episode) for seed in SEEDS]
