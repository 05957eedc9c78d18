"""What is sampled from: a distribution worked out by hand, cut and inverted as `SamplingParams` says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from envkit.trainer_bridge.engines import sampling
from envkit.trainer_bridge.engines.sampling import sample
from envkit.types import SamplingParams, stable_hash

DICE = (0.1, 0.4, 0.05, 0.3, 0.15)
"""Chances of the five tokens, whatever the prompt."""
SEED = 3


def roll(count: int, **how: Any) -> list[tuple[int, float]]:
    """Sample `count` tokens of one completion."""
    logits_V = torch.tensor(DICE).log() + 3.0  # what is added to all logits changes nothing
    params = SamplingParams(max_tokens=count, seed=SEED, **how)
    return sample(logits_V.expand(count, -1), [params] * count, range(count))


def shares(count: int = 1500, **how: Any) -> list[float]:
    seen = Counter(token for token, _ in roll(count, **how))
    return [seen[token] / count for token in range(len(DICE))]


def near(*chances: float) -> list[object]:
    """Shares of 1500 throws lie within 0.04 of their chances (three deviations of the likeliest)."""
    return [pytest.approx(chance, abs=0.04) if chance else 0 for chance in chances]


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({}, DICE),
        # Squares 0.01, 0.16, 0.0025, 0.09, 0.0225; their sum 0.285.
        ({"temperature": 0.5}, [chance**2 / 0.285 for chance in DICE]),
        ({"temperature": 0.0}, (0, 1, 0, 0, 0)),
        ({"top_k": 2}, (0, 4 / 7, 0, 3 / 7, 0)),  # 0.4 and 0.3 of 0.7
        ({"top_p": 0.01}, (0, 1, 0, 0, 0)),  # the likeliest stays, however small the bound
        ({"top_p": 0.41}, (0, 4 / 7, 0, 3 / 7, 0)),
        ({"top_p": 0.71}, (0, 40 / 85, 0, 30 / 85, 15 / 85)),  # 0.4 + 0.3 do not reach 0.71
        ({"top_k": 4, "top_p": 0.1}, (0, 1, 0, 0, 0)),
    ],
)
def test_temperature_top_k_and_top_p_keep_these_chances(how: dict[str, Any], kept: Sequence[float]) -> None:
    assert shares(**how) == near(*kept)


def test_a_seed_is_a_place_in_the_distribution() -> None:
    # Seed and place hash to a number in [0, 1): the token is the one in whose stretch of [0, 1) it falls.
    edges = [0.1, 0.5, 0.55, 0.85, 1.0]
    for place, (token, _) in enumerate(roll(200)):
        number = stable_hash(SEED, place) / 2**64
        assert token == next(one for one, edge in enumerate(edges) if number < edge)


def test_logprobs_are_those_of_the_tempered_distribution_before_top_k_and_top_p() -> None:
    for token, logprob in roll(40, temperature=0.5, top_k=2, top_p=0.8):
        assert logprob == pytest.approx(math.log(DICE[token] ** 2 / 0.285), abs=1e-5)
    for token, logprob in roll(5, temperature=0.0):
        assert logprob == pytest.approx(math.log(DICE[token]), abs=1e-5)


def test_rows_are_sampled_in_parts_as_they_are_at_once() -> None:
    vocabulary = sampling._SAMPLED_NUMBERS // 2  # two rows a part
    logits_BV = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(seed=row, temperature=0.7 * (row % 3), top_p=0.9 if row == 3 else 1.0) for row in range(5)]
    positions = [3, 1, 4, 1, 5]
    apart = [sample(logits_BV[row : row + 1], params[row : row + 1], positions[row : row + 1])[0] for row in range(5)]
    assert sample(logits_BV, params, positions) == apart
