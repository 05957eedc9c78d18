"""Every key of every part of an algorithm acts: with another value, the part gives other numbers for some rollouts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from envkit.config import kinds
from envkit.trainer_bridge.trainers.evaluate_part import Evaluated, evaluate_part
from tests.config.leaves import Leaf

FAMILIES = ("advantages", "losses", "aggregations", "corrections")
OTHERS: Mapping[str, Any] = {
    "clipped.dual_clip": 1.01,
    "clip_cov.dual_clip": 1.01,
    "clip_cov.low": 0.5,
    "kl_cov.share": 0.5,
    "clip_cov.high": 0.1,
    "clip_cov.share": 1.0,
    "top_entropy.dual_clip": 1.01,
    "several_rewards.weights": {"form": 3.0},
    "mis.low": 0.9,
    "cispo.clip_low": 0.1,
}
"""Other values of keys for which `Leaf.other` knows none, or one that changes nothing for these rollouts."""
WITH: Mapping[str, Mapping[str, Any]] = {
    "chunk_returns.normalise": {"reward": "turns"},
    **{f"{kind}.mean": {"unit": "rollout"} for kind in ("tis", "mis")},
    "top_entropy.clip_low": {"share": 1.0},
    "sequence_mask.mean": {"low": 0.3, "high": 3.0},
    **{f"clip_cov.{key}": {"low": -9.0, "high": 9.0, "share": 0.5} for key in ("low", "high", "share")},
}
"""Further keys with which a key is shown."""


def rollouts() -> list[dict[str, Any]]:
    """Two groups of four ragged episodes, in which nothing is equal by chance and every ratio is far from 1."""
    rng = random.Random(3)

    def turn(number: int) -> dict[str, Any]:
        size = rng.randint(2, 3)
        logp = [-rng.uniform(0.1, 2) for _ in range(size)]
        old = [one + rng.gauss(0, 0.8) for one in logp]
        return {
            "reward": rng.gauss(0, 1),
            "rewards": {"answer": rng.gauss(0, 1), "form": rng.gauss(0, 1)},
            "observation": f"state {number % 2}",
            "value": [rng.gauss(0, 1), rng.gauss(0, 1)],
            "values": [rng.gauss(0, 1) for _ in range(size)],
            "logp": logp,
            "old": old,
            "sampled": [one + rng.gauss(0, 0.8) for one in old],
            "reference": [-rng.uniform(0.1, 2) for _ in range(size)],
            "entropy": [rng.uniform(0, 2) for _ in range(size)],
            "advantage": [rng.gauss(0, 2) for _ in range(size)],
        }

    return [
        {
            "group": "ab"[row % 2],
            "member": row // 2,
            "stop": "max_turns" if row % 3 else "terminated",
            "after": [row / 4, 1.0],
            "turns": [turn(number) for number in range(rng.randint(1, 4))],
        }
        for row in range(8)
    ]


ROLLOUTS = rollouts()
KEYS = {
    f"{kind}.{name}": field
    for family in FAMILIES
    for kind in kinds.FAMILIES[family].built_in
    for name, field in kinds.find(family, kind).section.model_fields.items()
    if name != "kind"
}


@cache
def with_defaults(kind: str) -> list[Any]:
    return made(kind, {})


def made(kind: str, settings: Mapping[str, Any]) -> list[Any]:
    one: Evaluated = evaluate_part(kind, settings, ROLLOUTS)
    return [one.value, [*one.gradient], [*one.entropy_weight]]


def other(key: str, field: FieldInfo) -> Any:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return OTHERS[key] if key in OTHERS else Leaf(key, default, field.annotation).other()


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_a_part_acts(key: str) -> None:
    kind, _, name = key.partition(".")
    changed = {**WITH.get(key, {}), name: other(key, KEYS[key])}
    assert made(kind, changed) != (made(kind, WITH[key]) if key in WITH else with_defaults(kind))
