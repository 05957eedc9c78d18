"""Wall-clock timing of calls that mostly wait. Contestants take turns, so noise of the machine affects all of them.

`timing.py` measures the CPU time of programs that compute.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import truediv
from typing import NamedTuple, TypeAlias

import anyio

from envkit import clock

Call: TypeAlias = Callable[[], Awaitable[object]]
"""Makes one call. If it returns a function, this function is called for clean-up afterwards and is not timed."""
CallBy: TypeAlias = Callable[[int], Awaitable[object]]
"""Makes one call for the caller with the given number. A number that it returns is how many calls it counts as."""
Rounds: TypeAlias = Mapping[str, Sequence[Sequence[float]]]
"""Seconds of every call in each round, for each contestant."""
Rates: TypeAlias = Mapping[str, Sequence[float]]
"""Calls per second in each round, for each contestant."""

_TICK_S = 0.01
_VERDICTS = {True: "holds", False: "BROKEN", None: "not checked"}


class FailedCallError(Exception):
    """A server answered a call with an error, so the call does not count."""


class Claim(NamedTuple):
    """A claim about a contestant. A claim without a limit is printed, but not checked.

    Attributes:
        what: Name of the measurement.
        ours: Name of the contestant.
        at_most: Maximum duration of the median call in milliseconds; with peers, as a multiple of the fastest peer's.
        at_least: Minimum speed, as a multiple of the fastest peer's.
        peers: Names of the contestants to compare with. Contestants that did not take part are ignored.
    """

    what: str
    ours: str
    at_most: float | None = None
    at_least: float | None = None
    peers: Sequence[str] = ()


class Findings:
    """Measures, prints each result immediately, and checks the claims at the end."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Rounds, Rates]] = {}

    async def latency(self, what: str, calls: Mapping[str, Call], *, number: int, rounds: int) -> None:
        """Time calls one after another, and print the median for each contestant.

        Args:
            what: Name of the measurement.
            calls: The call of each contestant.
            number: Number of calls per contestant.
            rounds: Number of rounds over which the calls are distributed.
        """
        seconds: dict[str, list[list[float]]] = {name: [] for name in calls}
        failed = dict.fromkeys(calls, 0)
        for call in calls.values():  # the first call is not timed, since it may load modules or data
            await _tidy(await call())
        for name in _turns(calls, rounds):
            seconds[name].append([])
            for _ in range(-(-number // rounds)):
                begin = clock.stopwatch()
                try:
                    tidy = await calls[name]()
                except FailedCallError:
                    failed[name] += 1
                    continue
                seconds[name][-1].append(clock.stopwatch() - begin)
                await _tidy(tidy)
        print(what)
        for name, each in seconds.items():
            every = sorted(1000 * one for one in chain(*each))
            middle, high = _short(statistics.median(every)), _short(every[len(every) * 9 // 10])
            print(f"  {name:20} {middle:>9} ms  (9 of 10 within {high}){_failures(failed[name])}", flush=True)
        self._found[what] = (seconds, {})

    async def rate(
        self,
        what: str,
        calls: Mapping[str, CallBy],
        *,
        callers: int | Mapping[str, int],
        rounds: int,
        round_s: float,
        cpu_s: Mapping[str, Callable[[], float]] | None = None,
        around: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Make concurrent calls without a pause, and print the median of the calls per second over the rounds.

        Args:
            what: Name of the measurement.
            calls: The call of each contestant.
            callers: Number of concurrent callers, for all contestants or for each.
            rounds: Number of rounds per contestant.
            round_s: Seconds after which no further call begins; running calls are awaited and counted. With 0, each
                caller makes one call.
            cpu_s: Functions that return the CPU seconds each contestant has used so far. Rates are then per CPU second,
                and the wall-clock rates are also printed.
            around: Called with the contestant's name, returns a context manager that is entered for each of its rounds.
        """
        rates: dict[str, list[float]] = {name: [] for name in calls}
        by_clock: dict[str, list[float]] = {name: [] for name in calls}
        failed = dict.fromkeys(calls, 0)
        done = 0

        async def make_calls(name: str, caller: int, until: float) -> None:
            nonlocal done
            while True:
                try:
                    did = await calls[name](caller)
                    done += did if isinstance(did, int) else 1
                except FailedCallError:
                    failed[name] += 1
                if clock.stopwatch() >= until:
                    return

        for name in _turns(calls, rounds):
            before_s = cpu_s[name]() if cpu_s else 0.0  # not timed: slow with many processes
            with around(name):
                done, begin = 0, clock.stopwatch()
                async with anyio.create_task_group() as tasks:
                    for caller in range(callers if isinstance(callers, int) else callers[name]):
                        tasks.start_soon(make_calls, name, caller, begin + round_s)
                by_clock[name].append(done / (clock.stopwatch() - begin))
            rates[name].append(done / max(cpu_s[name]() - before_s, _TICK_S) if cpu_s else by_clock[name][-1])
        print(what)
        for name, each in rates.items():
            span = f"{_short(min(each))} to {_short(max(each))}"
            unit = "/s of processor" if cpu_s else "/s"
            clocked = f"; {_short(statistics.median(by_clock[name]))} /s" if cpu_s else ""
            rate = f"{_short(statistics.median(each)):>9} {unit}"
            print(f"  {name:20} {rate}  ({span}{clocked}){_failures(failed[name])}", flush=True)
        self._found[what] = ({}, rates)

    def check(self, claims: Sequence[Claim], *, is_strict: bool = True) -> None:
        """Print each claim and whether it holds. If `is_strict`, exit with status 1 if a claim does not hold."""
        print("Claims" if is_strict else "Claims (not of a quick run)")
        broken = 0
        for claim in claims:
            message, holds = self._check(claim)
            broken += holds is False
            print(f"  {_VERDICTS[holds]:11}  {claim.what}, {claim.ours}: {message}")
        if broken and is_strict:
            sys.exit(f"{broken} of {len(claims)} claims broken")

    def _check(self, claim: Claim) -> tuple[str, bool | None]:
        seconds, rates = self._found.get(claim.what, ({}, {}))
        speeds = rates or {name: [1 / statistics.median(each) for each in rounds] for name, rounds in seconds.items()}
        peers = [name for name in claim.peers if name in speeds]
        if claim.ours not in speeds or (claim.peers and not peers):
            return f"{' or '.join(claim.peers) or 'it'} did not take part", None
        if not peers:
            assert claim.at_most is not None
            found = 1000 * statistics.median(chain(*seconds[claim.ours]))
            return f"{found:.3g} ms, at most {claim.at_most:g} wanted", found <= claim.at_most
        peer = max(peers, key=lambda name: statistics.median(speeds[name]))
        # Compare within a round, since the machine's other load changes between rounds.
        times = statistics.median(map(truediv, speeds[claim.ours], speeds[peer]))
        if claim.at_least is None and claim.at_most is None:
            return f"{times:.3g} times as fast as {peer}", None
        if claim.at_least is not None:
            return f"{times:.3g} times as fast as {peer}, at least {claim.at_least:g} wanted", times >= claim.at_least
        assert claim.at_most is not None
        return f"{1 / times:.3g} times the time of {peer}, at most {claim.at_most:g} wanted", 1 / times <= claim.at_most


async def _tidy(after: object) -> None:
    if callable(after):
        await after()


def _turns(names: Mapping[str, object], rounds: int) -> Iterator[str]:
    for number in range(rounds):
        yield from list(names)[:: -1 if number % 2 else 1]


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _failures(number: int) -> str:
    return f"; {number} more failed" if number else ""
