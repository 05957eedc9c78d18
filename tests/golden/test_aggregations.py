"""Aggregations: worked out by hand, and however rollouts are stored."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from envkit.config import kinds
from envkit.trainer_bridge.trainers.evaluate_part import evaluate_part
from tests.golden import drawn

# Group a has rollouts of 3 tokens (in two samples, with one of a tool) and of 1; group b has one of 2.
ROLLOUTS: list[dict[str, Any]] = [
    {"group": "a", "turns": [{"mask": [1, 0, 1]}, {"mask": [1], "starts_sample": True}]},
    {"group": "a", "turns": [{}]},
    {"group": "b", "turns": [{}, {}]},
]


@pytest.mark.parametrize(
    ("kind", "settings", "weights"),
    [
        ("token_mean", {}, [1 / 6, 1 / 6, 1 / 6]),
        ("rollout_mean", {}, [1 / 9, 1 / 3, 1 / 6]),  # a third for each rollout
        ("prompt_mean", {}, [1 / 8, 1 / 8, 1 / 4]),  # half for each group, of 4 and of 2 tokens
        ("constant", {}, [1 / 3, 1 / 3, 1 / 3]),
        ("constant", {"tokens": 10}, [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_weights_worked_out_by_hand(kind: str, settings: Mapping[str, Any], weights: Sequence[float]) -> None:
    sizes = [3, 1, 2]
    expected = [[pytest.approx(one)] * size for one, size in zip(weights, sizes, strict=True)]
    assert evaluate_part(kind, settings, ROLLOUTS).value == expected


@pytest.mark.parametrize("kind", kinds.names("aggregations"))
@pytest.mark.parametrize("seed", range(3))
def test_means_sum_to_one_and_samples_and_order_change_nothing(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    rollouts = drawn.rollouts(rng)
    made = evaluate_part(kind, {}, rollouts).value
    other, order = drawn.cut(rollouts, rng)
    assert evaluate_part(kind, {}, other).value == [made[place] for place in order]
    assert evaluate_part(kind, {}, drawn.without_tools(rollouts)).value == made
    if kind != "constant":
        assert math.fsum(one for row in made for one in row) == pytest.approx(1.0, abs=1e-12)
