"""Random rollouts for `evaluate_part`, and the same ones in other samples and another order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

JUNK = 7.5
"""Stands at the tokens of tools; a result that depends on it is wrong."""

_PER_TOKEN = ("logp", "old", "sampled", "reference", "entropy", "advantage")


def rollouts(rng: random.Random) -> list[dict[str, Any]]:
    """Return rollouts in groups of 1 to 3, each with 1 to 3 turns of 1 to 3 tokens, and with tokens of tools."""
    sizes = [1, 2, 3]
    return [
        {"group": str(size), "member": member, "turns": [_turn(rng) for _ in range(rng.randint(1, 3))]}
        for size in sizes
        for member in range(size)
    ]


def _turn(rng: random.Random) -> dict[str, Any]:
    numbers: dict[str, list[float]] = {name: [] for name in (*_PER_TOKEN, "mask")}
    for own in [True, *(rng.random() < 0.6 for _ in range(rng.randint(0, 2)))]:
        logp = rng.uniform(-3, -0.1)
        old = min(logp + rng.gauss(0, 0.4), -0.05)
        near = [min(old + rng.gauss(0, 0.4), -0.05) for _ in "sr"]
        values = [logp, old, *near, rng.uniform(0, 2), rng.gauss(0, 1.5)] if own else [JUNK] * 6
        for name, value in zip(numbers, [*values, float(own)], strict=True):
            numbers[name].append(value)
    return {**numbers, "reward": rng.gauss(0, 1)}


def cut(given: Sequence[dict[str, Any]], rng: random.Random) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the rollouts in another order, each in any number of samples, and the place of each in `given`."""
    order = rng.sample(range(len(given)), len(given))
    return [
        {**given[one], "turns": [{**turn, "starts_sample": rng.random() < 0.5} for turn in given[one]["turns"]]}
        for one in order
    ], order


def without_tools(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rollouts without the tokens of tools."""

    def kept(turn: dict[str, Any]) -> dict[str, Any]:
        own = {name: [one for one, mine in zip(turn[name], turn["mask"], strict=True) if mine] for name in _PER_TOKEN}
        return {**{name: value for name, value in turn.items() if name != "mask"}, **own}

    return [{**one, "turns": [kept(turn) for turn in one["turns"]]} for one in given]


def moved(given: Sequence[dict[str, Any]], steps: Iterable[float]) -> list[dict[str, Any]]:
    """Return rollouts without tokens of tools, where the log-probability of each token is larger by its step."""
    each = iter(steps)
    return [
        {**one, "turns": [{**turn, "logp": [value + next(each) for value in turn["logp"]]} for turn in one["turns"]]}
        for one in given
    ]
