"""The cost of generating a Sokoban level, and whether the levels are solvable.

envkit generates a level at each reset, with default options and a new seed. The peers use their own defaults. Then
`games/solver.py`, which is independent of all generators, solves the first levels of each contestant. This reports how
many are solvable, how long solutions are, and whether envkit's ``info["level"]["shortest"]`` is right. ROLL and RAGEN
(``--roll PATH --ragen PATH``) take part, but no claim is about them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from games.contestants import Peer, parser, taking_part
from games.peers import GRADED, Maker
from games.solver import TooLargeError, shortest_solution
from settings import parsed
from timing import Claim, Rates, check, measure, turns

import envkit

CLAIMS = (
    Claim("envkit 8x8, 2 boxes", 100, ["gym-sokoban 8x8, 2 boxes"]),
    Claim("envkit 8x8, 2 boxes", 20, ["GEM 8x8, 2 boxes"]),
)

KINDS = ((8, 2), (6, 1), (6, 2), (10, 4))
"""Sizes and numbers of boxes of the levels to generate."""
SLOW = (10, 4)
"""The size and number of boxes at which a peer takes seconds per level. Rounds are short (one level of such a peer),
and of the peers only the two that claims name take part.
"""


class Made(NamedTuple):
    """A generated level: an observation that ends with its board, and the reported length of its shortest solution."""

    text: str
    shortest: int | None


class Own:
    """Generates levels with envkit; callable as a `timing.Turn`."""

    def __init__(self, size: int, boxes: int) -> None:
        env = envkit.make("Sokoban-v0", size=size, boxes=boxes)

        def make(seed: int) -> Made:
            text, info = env.reset(seed=seed)
            return Made(text, info["level"]["shortest"])

        self._maker = Maker(make)
        self._turns = turns(self._maker.play)

    def __call__(self, cpu_s: float) -> float:
        return self._turns(cpu_s)

    def levels(self) -> list[Made]:
        """Return the first levels that were made."""
        return self._maker.kept


def grade(name: str, levels: Sequence[Made], size: int) -> None:
    """Solve the levels of the contestant `name`, whose boards have `size` rows, and print the results."""
    lengths: list[int | None] = []
    reported, right = 0, 0
    for text, shortest in levels:
        try:
            length = shortest_solution("\n".join(text.split("\n")[-size:]))
        except TooLargeError:
            continue
        lengths.append(length)
        reported += shortest is not None
        right += shortest is not None and shortest == length
    solved = [length for length in lengths if length is not None]
    line = f"  {name:50} {len(levels)} levels"
    if len(lengths) < len(levels):
        line += f", {len(levels) - len(lengths)} too large to search"
    if lengths:
        line += f", {len(solved) / len(lengths):.0%} of {len(lengths)} solvable"
    if solved:
        line += f"; moves {min(solved)} to {max(solved)}, median {statistics.median(solved):g}"
    print(line + (f"; {right} of {reported} reported lengths are right" if reported else ""), flush=True)


def compare(size: int, boxes: int, settings: argparse.Namespace) -> Rates:
    """Time and grade levels of one size and number of boxes."""
    kind = f"{size}x{size}, {boxes} box{'es' if boxes > 1 else ''}"
    is_slow = (size, boxes) == SLOW
    print(f"Sokoban {kind}: new levels")
    starts: dict[str, Callable[[], Own | Peer]] = {f"envkit {kind}": partial(Own, size, boxes)}
    peers: dict[str, tuple[object, ...]] = {
        "gym-sokoban": ("gym_sokoban_levels",),
        "GEM": ("gem_levels",),
        "ROLL": ("roll_levels", settings.roll),
        "RAGEN": ("ragen_levels", settings.ragen),
    }
    for name, (peer, *checkout) in list(peers.items())[: 2 if is_slow else None]:
        starts[f"{name} {kind}"] = partial(Peer, settings, str(peer), *checkout, size, boxes)
    with taking_part(starts) as makers:
        round_cpu_s = min(0.1, settings.round_cpu_s) if is_slow else settings.round_cpu_s
        rates = measure(makers, unit="levels", rounds=settings.rounds, round_cpu_s=round_cpu_s)
        for name, maker in makers.items():
            levels = [made if isinstance(made, Made) else Made(made, None) for made in maker.levels()]
            grade(name, levels[: 10 if is_slow else GRADED], size)
    return rates


def main() -> None:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=5, round_cpu_s=2.0)
    arguments.add_argument("--kinds", type=int, default=len(KINDS), help="number of kinds of levels; slowest last")
    settings = parsed(arguments, rounds=1, round_cpu_s=0.02, kinds=1)
    rates: dict[str, Sequence[float]] = {}
    for size, boxes in KINDS[: settings.kinds]:
        rates |= compare(size, boxes, settings)
    check(CLAIMS, rates, is_strict=not settings.quick)


if __name__ == "__main__":
    main()
