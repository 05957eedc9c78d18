"""Peers: how to start Sokoban in other projects. Whatever one imports is imported when it is started.

ROLL and RAGEN are no packages that can be installed: they are given as checkouts.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

MakeLevel = Callable[[int], str]
"""Makes the level of a seed; returns its board in envkit's symbols."""

_SYMBOLS = "#_O√XPS"  # by the code that gym-sokoban and all who took it over give a cell
_ENDLESS = 10**9

PeerT = TypeVar("PeerT")


class MissingPeerError(Exception):
    """A peer was not given."""


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of what all these benchmarks are told."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roll", type=Path, metavar="PATH", help="checkout of ROLL; without it, it is left out")
    parser.add_argument("--ragen", type=Path, metavar="PATH", help="checkout of RAGEN; without it, it is left out")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of which the median counts")
    parser.add_argument("--round-cpu-s", type=float, default=0.4, help="CPU seconds a contestant and round, at least")
    return parser


def those_present(openings: Mapping[str, Callable[[], PeerT]]) -> dict[str, PeerT]:
    """Open each; leave out with a note what is not here."""
    opened = {}
    for name, start in openings.items():
        try:
            opened[name] = start()
        except MissingPeerError as error:
            print(f"  left out: {name}: {error}")
        except ImportError as error:
            print(f"  left out: {name}: {error}; pip install -r benchmarks/peers.txt")
    return opened


def gem_sokoban(size: int, boxes: int, *, max_turns: int) -> Any:
    """GEM's Sokoban: text in, text out."""
    gem = import_module("gem")
    logging.getLogger().setLevel(logging.WARNING)
    return gem.make("game:Sokoban-v0-easy", dim_room=(size, size), num_boxes=boxes, max_turns=max_turns)


def roll_sokoban(checkout: Path | None, size: int, boxes: int, *, max_steps: int) -> Any:
    """ROLL's Sokoban: text in, text out; at its default search depth."""
    packages = ("roll", "roll.utils", "roll.pipeline", "roll.pipeline.agentic", "roll.pipeline.agentic.env")
    _find(checkout, "--roll", packages)
    env = import_module("roll.pipeline.agentic.env.sokoban.env")
    return env.SokobanEnv(dim_room=(size, size), num_boxes=boxes, max_steps=max_steps)


def ragen_sokoban(checkout: Path | None, size: int, boxes: int, *, max_steps: int) -> Any:
    """RAGEN's Sokoban: numbers 1 to 4 in (its answers are read elsewhere), text out; at its default search depth."""
    _find(checkout, "--ragen", ("ragen", "ragen.env"))
    config = import_module("ragen.env.sokoban.config")
    env = import_module("ragen.env.sokoban.env")
    return env.SokobanEnv(config.SokobanEnvConfig(dim_room=(size, size), num_boxes=boxes, max_steps=max_steps))


def gym_sokoban_levels(size: int, boxes: int) -> MakeLevel:
    """gym-sokoban's ``generate_room``, again until it makes one, as its reset does."""
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
    """The reset of GEM's Sokoban."""
    return _resets(gem_sokoban(size, boxes, max_turns=_ENDLESS))


def roll_levels(checkout: Path | None, size: int, boxes: int) -> MakeLevel:
    """The reset of ROLL's Sokoban."""
    return _resets(roll_sokoban(checkout, size, boxes, max_steps=_ENDLESS))


def ragen_levels(checkout: Path | None, size: int, boxes: int) -> MakeLevel:
    """The reset of RAGEN's Sokoban."""
    return _resets(ragen_sokoban(checkout, size, boxes, max_steps=_ENDLESS))


def _resets(env: Any) -> MakeLevel:
    def make(seed: int) -> str:
        env.reset(seed=seed)
        return _board(env.room_fixed, env.room_state)

    return make


def _board(fixed: Any, state: Any) -> str:
    codes = np.where((state == 5) & (fixed == 2), 6, state).astype(int).tolist()
    return "\n".join("".join(_SYMBOLS[code] for code in row) for row in codes)


def _find(checkout: Path | None, option: str, packages: tuple[str, ...]) -> None:
    """Let modules be imported from a checkout without running its packages, which would import a whole trainer."""
    if checkout is None:
        raise MissingPeerError(f"give its checkout with {option} PATH")
    if not (checkout / packages[0]).is_dir():
        sys.exit(f"{option} {checkout}: there is no folder {packages[0]} in it")
    for name in packages:
        package = ModuleType(name)
        package.__path__ = [str(checkout.joinpath(*name.split(".")))]
        sys.modules.setdefault(name, package)
