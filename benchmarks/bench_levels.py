"""What a new level of Sokoban costs, and whether it can be solved.

envkit's levels are those of a reset with default options and a seed that was never used before; the peers' are made
with their defaults. The first levels that each makes are solved from the start by `solver`, which knows nothing of how
they were made: it says how many can be solved, how long the solutions are, and whether envkit's
``info["level"]["shortest"]`` is right. ROLL and RAGEN, given as ``--roll PATH --ragen PATH``, are only shown.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, islice
from typing import NamedTuple

import peers
from solver import TooLargeError, shortest_solution
from timing import Claim, Play, Rates, check, measure

import envkit

CLAIMS = (
    Claim("envkit 8x8, 2 boxes", 100, ["gym-sokoban 8x8, 2 boxes"]),
    Claim("envkit 8x8, 2 boxes", 20, ["GEM 8x8, 2 boxes"]),
)

KINDS = ((8, 2), (6, 1), (6, 2), (10, 4))
"""Size and boxes."""
SLOW = (10, 4)
"""Of these a peer needs several seconds for one: one a round, and only the two that are claimed about."""
GRADED = 100


class Made(NamedTuple):
    """A level that was made: an observation that ends with its board, and what is said of its shortest solution."""

    text: str
    shortest: int | None


class Maker:
    """Makes levels of new seeds, and keeps the first ones."""

    def __init__(self, make: Callable[[int], Made]) -> None:
        self.kept: list[Made] = []
        self._make = make
        self._seeds = count()

    def play(self, times: int) -> int:
        for seed in islice(self._seeds, times):
            made = self._make(seed)
            if len(self.kept) < GRADED:
                self.kept.append(made)
        return times


def envkit_levels(size: int, boxes: int) -> Maker:
    env = envkit.make("Sokoban-v0", size=size, boxes=boxes)

    def make(seed: int) -> Made:
        text, info = env.reset(seed=seed)
        return Made(text, info["level"]["shortest"])

    return Maker(make)


def peer_levels(start: Callable[[int, int], peers.MakeLevel], size: int, boxes: int) -> Maker:
    make = start(size, boxes)
    return Maker(lambda seed: Made(make(seed), None))


def grade(name: str, levels: Sequence[Made], size: int) -> None:
    """Solve levels and print what comes out."""
    lengths: list[int | None] = []
    said, right = 0, 0
    for text, shortest in levels:
        try:
            length = shortest_solution("\n".join(text.split("\n")[-size:]))
        except TooLargeError:
            continue
        lengths.append(length)
        said += shortest is not None
        right += shortest is not None and shortest == length
    solved = [length for length in lengths if length is not None]
    line = f"  {name:50} {len(levels)} levels"
    if len(lengths) < len(levels):
        line += f", {len(levels) - len(lengths)} too large to search"
    if lengths:
        line += f", {len(solved) / len(lengths):.0%} of {len(lengths)} solvable"
    if solved:
        line += f"; moves {min(solved)} to {max(solved)}, median {statistics.median(solved):g}"
    print(line + (f"; {right} of {said} agree with what was said" if said else ""), flush=True)


def compare(size: int, boxes: int, told: argparse.Namespace) -> Rates:
    """Time and grade levels of one kind."""
    kind = f"{size}x{size}, {boxes} box{'es' if boxes > 1 else ''}"
    is_slow = (size, boxes) == SLOW
    print(f"Sokoban {kind}: new levels")
    starts: dict[str, Callable[[], Maker]] = {f"envkit {kind}": partial(envkit_levels, size, boxes)}
    all_starts: dict[str, Callable[[int, int], peers.MakeLevel]] = {
        "gym-sokoban": peers.gym_sokoban_levels,
        "GEM": peers.gem_levels,
        "ROLL": partial(peers.roll_levels, told.roll),
        "RAGEN": partial(peers.ragen_levels, told.ragen),
    }
    for name, start in list(all_starts.items())[: 2 if is_slow else None]:
        starts[f"{name} {kind}"] = partial(peer_levels, start, size, boxes)
    makers = peers.those_present(starts)
    plays: dict[str, Play] = {name: maker.play for name, maker in makers.items()}
    round_cpu_s = 0.1 if is_slow else told.round_cpu_s
    rates = measure(plays, unit="levels", rounds=told.rounds, round_cpu_s=round_cpu_s)
    for name, maker in makers.items():
        grade(name, maker.kept[: 10 if is_slow else GRADED], size)
    return rates


def main() -> None:
    parser = peers.arguments(__doc__)
    parser.set_defaults(rounds=5, round_cpu_s=2.0)
    told = parser.parse_args()
    rates: dict[str, Sequence[float]] = {}
    for size, boxes in KINDS:
        rates |= compare(size, boxes, told)
    check(CLAIMS, rates)


if __name__ == "__main__":
    main()
