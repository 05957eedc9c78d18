"""Robustness: any action gets an observation, and finished episodes leave no memory behind."""

from __future__ import annotations

import gc
import math
import os
import random
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest

import envkit
from envkit.environments.board import MOVES
from envkit.types import Observation
from envkit.wiring.environments import open_expert

SPECS = {str(spec.entry_point): spec for spec in reversed(envkit.registered()) if not spec.needs}.values()
"""One environment of each class: the others are these with other options."""
IDS = [spec.id for spec in SPECS]
NATIVE = [spec.id for spec in SPECS if spec.vector_entry_point is not None]
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("FrozenLake-v0", {"actions_per_turn": 5}),
    ("WebShop-v0", {"rules": "parity"}),
    ("WebShop-v0", {"observation": "compact"}),
]
EVERY_ENV = pytest.mark.parametrize(("env_id", "options"), [*((env_id, {}) for env_id in IDS), *WAYS])
LENGTH = 2**18


def _random_bytes() -> Iterator[str]:
    """Random bytes as they come out of a decoder: one character each, or with surrogates, or with replacements."""
    rng = random.Random(4)
    for length in (1, 2, 7, 64, 65, 300, 5000):
        for _ in range(3):
            raw = rng.randbytes(length)
            yield raw.decode("latin-1")
            yield raw.decode("utf-8", errors="surrogateescape")
            yield f"<answer>{raw.decode('utf-8', errors='replace')}</answer>"


LARGE = {
    "letters": "x" * LENGTH,
    "spaces": " " * LENGTH,
    "line ends": "\n" * LENGTH,
    "faces outside the first plane": "\N{GRINNING FACE}" * LENGTH,
    "letters that grow in lower case": "\u0130" * LENGTH,
    "random bytes": random.Random(1).randbytes(LENGTH).decode("latin-1"),
    "openings": "<answer>" * (LENGTH // 8),
    "boxed": "\\boxed{" * (LENGTH // 7),
    "bars": f"<answer>{'|' * LENGTH}</answer>",
    "moves": f"<answer>{'up||' * (LENGTH // 4)}up</answer>",
    "spaces around a move": f"<answer>{' ' * LENGTH}up{' ' * LENGTH}</answer>",
    "a move at the end": "x" * LENGTH + "<answer>up</answer>",
    "brackets": "search[" + "[" * LENGTH + "]",
}
TAGS = {
    "one answer a thousand times": "<answer>up</answer>" * 1000,
    "nested": "<answer>" * 1000 + "up" + "</answer>" * 1000,
    "crossed": "</answer><answer>" * 1000,
    "a thousand moves": f"<answer>{' || '.join(['left'] * 1000)}</answer>",
    "a thousand boxed": "\\boxed{up}" * 1000,
}
ODD = [
    *("click[", "search[]", "search[\ud800]", "click[(a+)+$]"),  # of the shop
    *("", "\ud800", "\udfff<answer>up</answer>", "\x00", "\ufeff", "\u202eup", "\u2028", "\r\n", "e\u0301" * 50),
    "<answer>\uff55\uff50</answer>",  # full-width letters
    "<answer>u\u200bp</answer>",
    "<ANSWER>\u00dcP</ANSWER>",
    "<answer>\u212a</answer>",  # the Kelvin sign, a letter in lower case
    "%s%n{0}{__class__}${x}`rm -rf`'; DROP TABLE levels; --",
]
HOSTILE = [*ODD, *TAGS.values(), *_random_bytes()]


def _assert_answered(env: gymnasium.Env[Any, Any], step: tuple[Any, ...]) -> None:
    observation, reward, terminated, truncated, info = step
    assert env.observation_space.contains(observation)
    assert math.isfinite(reward)
    assert {type(terminated), type(truncated)} == {bool}
    assert {type(info[name]) for name in env.metadata["metrics"]} <= {bool, float}
    assert info["action_is_valid"] or not info.get("action_is_effective", info["success"])


@EVERY_ENV
def test_any_text_gets_an_observation(env_id: str, options: dict[str, Any]) -> None:
    env = envkit.make(env_id, **options)
    for seed, text in enumerate((*HOSTILE, *LARGE.values())):
        env.reset(seed=seed)
        _assert_answered(env, env.step(text))


@pytest.mark.parametrize("env_id", NATIVE[:1])
@pytest.mark.parametrize("dtype", [np.int8, np.uint64])
def test_numbers_from_end_to_end_of_their_type_get_an_observation(env_id: str, dtype: Any) -> None:
    ends = np.iinfo(dtype)
    numbers = np.array([ends.min, ends.max, ends.max - 1, 4, 100], dtype)
    vector = envkit.make_vec(env_id, len(numbers), action="index", observation="grid")
    vector.reset(seed=0)
    seen, *_, infos = vector.step(numbers)
    assert vector.observation_space.contains(seen)
    assert infos["action_is_valid"].tolist() == [ends.min == 0, False, False, False, False]
    env = envkit.make(env_id, action="index", observation="grid")
    for number in numbers:
        env.reset(seed=0)
        _assert_answered(env, env.step(number))


@pytest.mark.parametrize("env_id", [spec.id for spec in SPECS if spec.expert is not None])
def test_an_expert_has_no_move_for_a_text_without_a_board(env_id: str) -> None:
    expert = open_expert(env_id)
    for text in HOSTILE:
        assert list(expert.moves(Observation(text))) == []
        assert not expert.is_hazardous(Observation(text))


class Memory(NamedTuple):
    """The memory and objects of a process.

    Attributes:
        blocks: Small Python objects. Nobody leaks without them.
        resident_bytes: Its pages in memory; 0 where the system does not say.
    """

    blocks: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        pages = Path("/proc/self/statm")
        resident = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0
        return cls(sys.getallocatedblocks(), resident)


def _assert_flat(before: Memory) -> None:
    """Allow for 2,000 small objects and 8 MiB: less than one object for each of some thousand episodes."""
    after = Memory.now()
    assert after.blocks - before.blocks < 2_000
    assert after.resident_bytes - before.resident_bytes < 8 << 20


WARM_EPISODES = 5_000
"""More than the levels and answers that are remembered."""


@pytest.mark.slow
def test_many_single_steps_leave_no_memory_behind() -> None:
    """All answers differ, and all levels differ."""
    env = envkit.make("FrozenLake-v0", max_moves=60)
    env.reset(seed=0)
    step = episodes = number = 0
    before = Memory(0, 0)
    ways = cycle([f"<answer>{move}</answer>" for move in MOVES])
    while step < 20_000:
        number += 1
        _, _, terminated, truncated, _ = env.step(f"{number} {next(ways)}")
        if terminated or truncated:
            env.reset()
            episodes += 1
            if episodes == WARM_EPISODES:
                before = Memory.now()
        step += episodes >= WARM_EPISODES
    _assert_flat(before)


def test_discarded_environments_leave_no_memory_behind() -> None:
    def use(count: int, *, first: int) -> None:
        for seed in range(first, first + count):
            env = envkit.make("Sokoban-v0", num_levels=50, symbols="tuvwxyz")
            env.reset(seed=seed)
            env.step("<answer>up</answer>")
            env.close()

    use(200, first=0)
    before = Memory.now()
    use(600, first=200)
    _assert_flat(before)
