"""The games of other projects, and the settings that all contestants play. This module does not import envkit.

A peer is imported when `peer_process.py` starts it in the peers' virtual environment. ROLL and RAGEN are not
installable packages, so they are given as checkouts.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import count, cycle, islice
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from timing import Play

LevelT = TypeVar("LevelT")

SIZE, BOXES, MAX_MOVES = 6, 1, 10_000
"""Size, number of boxes and move limit of the rooms in which single text steps are measured."""
MOVES = [Random(0).choice(("up", "down", "left", "right")) for _ in range(1 << 16)]
GRADED = 100
"""Number of levels to store for each generator."""

_SYMBOLS = "#_O√XPS"  # the index is gym-sokoban's code of a cell, which other projects also use
_ENDLESS = 10**9

MakeLevel: TypeAlias = Callable[[int], str]
"""Generates the level of a seed, and returns its board in envkit's symbols."""


class Maker(Generic[LevelT]):
    """Generates levels with new seeds, and stores the first ones."""

    def __init__(self, make: Callable[[int], LevelT]) -> None:
        self.kept: list[LevelT] = []
        self._make = make
        self._seeds = count()

    def play(self, times: int) -> int:
        for seed in islice(self._seeds, times):
            made = self._make(seed)
            if len(self.kept) < GRADED:
                self.kept.append(made)
        return times


def stepping(env: Any, actions: Sequence[object]) -> Play:
    """Return a `Play` that steps `env` with `actions` again and again, and resets `env` after each episode."""
    following = cycle(actions)
    seeds = count(1)
    env.reset(seed=0)

    def play(times: int) -> int:
        for action in islice(following, times):
            if True in env.step(action)[2:-1]:  # the values between reward and info are true if the episode ended
                env.reset(seed=next(seeds))
        return times

    return play


def batches(num_envs: int) -> Any:
    """Return 64 batches of random moves for `num_envs` environments."""
    return np.random.default_rng(0).integers(0, 4, (64, num_envs))


def stepping_all(envs: Any, batches: Sequence[Any]) -> Play:
    """Return a `Play` that steps the vector environment `envs`, which resets itself, with `batches` in turn."""
    following = cycle(batches)

    def play(times: int) -> int:
        for actions in islice(following, times):
            envs.step(actions)
        return times * len(batches[0])

    return play


def envpool(env_id: str, num_envs: str, num_threads: str) -> Play:
    sizes = {"num_envs": int(num_envs), "num_threads": int(num_threads)}
    envs = import_module("envpool").make_gymnasium(env_id, seed=0, **sizes)
    envs.reset()
    return stepping_all(envs, list(batches(int(num_envs)).astype(np.int32)))


def gem_text() -> Play:
    return stepping(gem_sokoban(SIZE, BOXES, max_turns=MAX_MOVES), [f"\\boxed{{{move}}}" for move in MOVES])


def roll_text(checkout: str) -> Play:
    env = roll_sokoban(checkout, SIZE, BOXES, max_steps=MAX_MOVES)
    return stepping(env, [f"<answer>{move}</answer>" for move in MOVES])


def ragen_text(checkout: str) -> Play:
    env = ragen_sokoban(checkout, SIZE, BOXES, max_steps=MAX_MOVES)
    numbers = {"up": 1, "down": 2, "left": 3, "right": 4}
    return stepping(env, [numbers[move] for move in MOVES])


def gem_sokoban(size: int, boxes: int, *, max_turns: int) -> Any:
    """Return GEM's Sokoban, with text as input and output."""
    gem = import_module("gem")
    logging.getLogger().setLevel(logging.WARNING)
    return gem.make("game:Sokoban-v0-easy", dim_room=(size, size), num_boxes=boxes, max_turns=max_turns)


def roll_sokoban(checkout: str, size: int, boxes: int, *, max_steps: int) -> Any:
    """Return ROLL's Sokoban, with text as input and output, and its default search depth."""
    packages = ("roll", "roll.utils", "roll.pipeline", "roll.pipeline.agentic", "roll.pipeline.agentic.env")
    _find(checkout, packages)
    env = import_module("roll.pipeline.agentic.env.sokoban.env")
    return env.SokobanEnv(dim_room=(size, size), num_boxes=boxes, max_steps=max_steps)


def ragen_sokoban(checkout: str, size: int, boxes: int, *, max_steps: int) -> Any:
    """Return RAGEN's Sokoban, with numbers 1 to 4 as input, text as output, and its default search depth."""
    _find(checkout, ("ragen", "ragen.env"))
    config = import_module("ragen.env.sokoban.config")
    env = import_module("ragen.env.sokoban.env")
    return env.SokobanEnv(config.SokobanEnvConfig(dim_room=(size, size), num_boxes=boxes, max_steps=max_steps))


def gym_sokoban_levels(size: int, boxes: int) -> MakeLevel:
    """Return a function that calls gym-sokoban's ``generate_room`` until it succeeds, as gym-sokoban's reset does."""
    rooms = import_module("gym_sokoban.envs.room_utils")

    def make(seed: int) -> str:
        random.seed(seed)
        np.random.seed(seed)
        while True:
            try:
                fixed, state, _ = rooms.generate_room((size, size), num_steps=int(1.7 * 2 * size), num_boxes=boxes)
            except (RuntimeError, RuntimeWarning):
                continue
            return _board(fixed, state)

    return make


def gem_levels(size: int, boxes: int) -> MakeLevel:
    """Return a function that generates levels by the reset of GEM's Sokoban."""
    return _resets(gem_sokoban(size, boxes, max_turns=_ENDLESS))


def roll_levels(checkout: str, size: int, boxes: int) -> MakeLevel:
    """Return a function that generates levels by the reset of ROLL's Sokoban."""
    return _resets(roll_sokoban(checkout, size, boxes, max_steps=_ENDLESS))


def ragen_levels(checkout: str, size: int, boxes: int) -> MakeLevel:
    """Return a function that generates levels by the reset of RAGEN's Sokoban."""
    return _resets(ragen_sokoban(checkout, size, boxes, max_steps=_ENDLESS))


def _resets(env: Any) -> MakeLevel:
    def make(seed: int) -> str:
        env.reset(seed=seed)
        return _board(env.room_fixed, env.room_state)

    return make


def _board(fixed: Any, state: Any) -> str:
    codes = np.where((state == 5) & (fixed == 2), 6, state).astype(int).tolist()
    return "\n".join("".join(_SYMBOLS[code] for code in row) for row in codes)


def _find(checkout: str, packages: tuple[str, ...]) -> None:
    """Make a checkout's modules importable without running its packages' ``__init__``, which import a whole trainer."""
    if not Path(checkout, packages[0]).is_dir():
        raise ImportError(f"there is no folder {packages[0]} in {checkout}")
    for name in packages:
        package = ModuleType(name)
        package.__path__ = [str(Path(checkout, *name.split(".")))]
        sys.modules.setdefault(name, package)


def _levels(start: Callable[..., MakeLevel], *arguments: str) -> Maker[str]:
    """Return a `Maker` for `start`, which gets `arguments`; the last two are the size and the number of boxes."""
    *checkout, size, boxes = arguments
    return Maker(start(*checkout, int(size), int(boxes)))


PEERS: Mapping[str, Callable[..., Play | Maker[str]]] = {
    "envpool": envpool,
    "gem_text": gem_text,
    "roll_text": roll_text,
    "ragen_text": ragen_text,
    "gym_sokoban_levels": partial(_levels, gym_sokoban_levels),
    "gem_levels": partial(_levels, gem_levels),
    "roll_levels": partial(_levels, roll_levels),
    "ragen_levels": partial(_levels, ragen_levels),
}
"""The peers by the name that `peer_process.py` uses. Their arguments are strings."""
