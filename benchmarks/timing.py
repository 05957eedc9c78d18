"""Measuring work per CPU second. Contestants play in rounds, so that noise of the machine affects all of them.

The CPU time of a contestant includes all threads of its process. This suits programs that compute, even on a machine
with other load; use `waiting.py` for programs that wait.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import truediv
from typing import NamedTuple, TypeAlias

Play: TypeAlias = Callable[[int], int]
"""Function that repeats its work the given number of times, and returns the number of steps or levels done."""
Turn: TypeAlias = Callable[[float], float]
"""Function that works for at least the given CPU seconds, and returns the steps or levels per CPU second."""
Rates: TypeAlias = Mapping[str, Sequence[float]]
"""Steps or levels per CPU second in each round, for each contestant."""

_CALIBRATED_S = 0.02


class Claim(NamedTuple):
    """A claim about the speed of a contestant.

    Attributes:
        ours: Name of the contestant.
        at_least: Minimum speed in the median round, as a multiple of the fastest peer; without peers, in units per CPU
            second.
        peers: Names of the contestants to compare with. Contestants that did not take part are ignored.
    """

    ours: str
    at_least: float
    peers: Sequence[str] = ()


def turns(play: Play) -> Turn:
    """Warm up `play`, and return a turn that times it in this process."""
    return partial(_rate, play, _calibrate(play))


def measure(contestants: Mapping[str, Turn], *, unit: str, rounds: int, round_cpu_s: float) -> Rates:
    """Measure all contestants, and print the median over the rounds for each.

    Args:
        contestants: The contestants by name.
        unit: Name of the unit of work, in the plural.
        rounds: Number of rounds. In each round, every contestant plays once; the order alternates.
        round_cpu_s: Minimum CPU seconds per contestant and round.
    """
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            rates[name].append(contestants[name](round_cpu_s))
    for name, each in rates.items():
        median = statistics.median(each)
        print(
            f"  {name:50} {_short(median):>9} {unit} per CPU-second"
            f"  ({_short(min(each))} to {_short(max(each))}; {_duration(1 / median)} each)",
            flush=True,
        )
    return rates


def check(claims: Sequence[Claim], rates: Rates, *, is_strict: bool = True) -> None:
    """Print each claim and whether it holds. If `is_strict`, exit with status 1 if a claim does not hold."""
    print("Claims" if is_strict else "Claims (not of a quick run)")
    broken = 0
    for ours, at_least, peers in claims:
        present = [name for name in peers if name in rates]
        if ours not in rates or (peers and not present):
            print(f"  not checked  {ours}: at least {at_least:g} times {' or '.join(peers)}, which did not take part")
            continue
        if present:
            peer = max(present, key=lambda name: statistics.median(rates[name]))
            # Compare within a round, since the machine's other load changes between rounds.
            found = statistics.median(map(truediv, rates[ours], rates[peer]))
            message = f"{found:.1f} times {peer}, at least {at_least:g} wanted"
        else:
            found = statistics.median(rates[ours])
            message = f"{_short(found)} per CPU-second, at least {_short(at_least)} wanted"
        broken += found < at_least
        print(f"  {'BROKEN' if found < at_least else 'holds':11}  {ours}: {message}")
    if broken and is_strict:
        sys.exit(f"{broken} of {len(claims)} claims broken")


def _calibrate(play: Play) -> int:
    """Warm up `play`, and return how often to call it between two readings of the clock."""
    times = 1
    while True:
        begin = time.process_time()
        play(times)
        if time.process_time() - begin >= _CALIBRATED_S:
            return times
        times *= 2


def _rate(play: Play, times: int, cpu_s: float) -> float:
    units = 0
    begin = time.process_time()
    while (spent := time.process_time() - begin) < cpu_s:
        units += play(times)
    return units / spent


def _short(number: float) -> str:
    for size, letter in ((1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _duration(seconds: float) -> str:
    for size, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
