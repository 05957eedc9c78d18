"""Corrections: worked out by hand, and however rollouts are stored."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from math import log
from typing import Any

import pytest

from envkit.config import kinds
from envkit.trainer_bridge.trainers.evaluate_part import evaluate_part
from tests.golden import drawn


def turn(ratios: Sequence[float], **more: Any) -> dict[str, Any]:
    """A turn whose tokens have these ratios of the trainer's to the sampler's probability."""
    return {"old": [-1.0] * len(ratios), "sampled": [-1.0 - log(ratio) for ratio in ratios], **more}


# Turns: products 4 * 1/4 = 1, 9 and 0.25; geometric means 1, 9**(1/2) = 3 and 0.25.
# Rollouts: products 1 * 9 = 9 and 0.25; geometric means 9**(1/4) = 3**(1/2) and 0.25. The 8 is a token of a tool.
ROLLOUTS: list[dict[str, Any]] = [
    {"turns": [turn([4, 1 / 4]), turn([1, 9, 8], mask=[1, 1, 0], starts_sample=True)]},
    {"turns": [turn([0.25])]},
]
ROOT = math.sqrt(3)

CASES: Sequence[tuple[str, Mapping[str, Any], list[float]]] = [
    ("tis", {}, [2, 0.25, 1, 2, 0.25]),
    ("tis", {"cap": 5}, [4, 0.25, 1, 5, 0.25]),
    ("tis", {"unit": "turn"}, [1, 1, 2, 2, 0.25]),
    ("tis", {"unit": "turn", "mean": "geometric", "cap": 5}, [1, 1, 3, 3, 0.25]),
    ("tis", {"unit": "rollout", "cap": 20}, [9, 9, 9, 9, 0.25]),
    ("tis", {"unit": "rollout", "mean": "geometric"}, [ROOT, ROOT, ROOT, ROOT, 0.25]),
    ("mis", {}, [0, 0.25, 1, 0, 0.25]),
    ("mis", {"cap": 4.5}, [4, 0.25, 1, 0, 0.25]),
    ("mis", {"low": 0.5}, [0, 0, 1, 0, 0]),
    ("mis", {"unit": "turn"}, [1, 1, 0, 0, 0.25]),
    ("mis", {"unit": "rollout", "mean": "geometric"}, [ROOT, ROOT, ROOT, ROOT, 0.25]),
    ("icepop", {}, [4, 0, 1, 0, 0]),
    ("icepop", {"low": 0.2, "high": 3}, [0, 0.25, 1, 0, 0.25]),
    ("sequence_mask", {}, [0, 0, 0, 0, 0]),
    ("sequence_mask", {"high": 1.8}, [1, 1, 1, 1, 0]),
    ("sequence_mask", {"low": 0.2}, [0, 0, 0, 0, 1]),
    ("sequence_mask", {"high": 1.8, "low": 0.2, "mean": "product"}, [0, 0, 0, 0, 1]),
]


@pytest.mark.parametrize(("kind", "settings", "factors"), CASES)
def test_factors_worked_out_by_hand(kind: str, settings: Mapping[str, Any], factors: list[float]) -> None:
    assert evaluate_part(kind, settings, ROLLOUTS).value == [pytest.approx(factors[:4]), pytest.approx(factors[4:])]


def test_every_correction_and_every_key_is_in_the_table() -> None:
    names = kinds.names("corrections")
    keys = {(kind, key) for kind in names for key in kinds.find("corrections", kind).section.model_fields}
    assert keys == {(kind, key) for kind, settings, _ in CASES for key in ("kind", *settings)}


@pytest.mark.parametrize("kind", kinds.names("corrections"))
@pytest.mark.parametrize("seed", range(3))
def test_samples_order_and_tokens_of_tools_change_nothing(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    rollouts = drawn.rollouts(rng)
    settings = {"low": 0.7, "high": 1.4} if kind == "sequence_mask" else {}
    made = evaluate_part(kind, settings, rollouts).value
    other, order = drawn.cut(rollouts, rng)
    assert evaluate_part(kind, settings, other).value == [pytest.approx(made[place]) for place in order]
    assert evaluate_part(kind, settings, drawn.without_tools(rollouts)).value == [pytest.approx(row) for row in made]


@pytest.mark.parametrize(("kind", "factor"), [("tis", 2), ("mis", 0), ("icepop", 0), ("sequence_mask", 0)])
def test_a_token_that_the_sampler_found_impossible_has_a_finite_factor(kind: str, factor: float) -> None:
    assert evaluate_part(kind, {}, [{"turns": [{"old": [-1.0], "sampled": [-math.inf]}]}]).value == [[factor]]
