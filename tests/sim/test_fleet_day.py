"""A day of a thousand sandboxes that fail at random, on virtual time: each one and each lease is accounted for."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from dataclasses import dataclass, field

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxLostError, SandboxStartError
from envkit.restarts import RestartBudget
from envkit.sandbox.fake import FakeBackend, Fate
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import Watch
from envkit.sandbox.pool.nodes import Holds, Node
from envkit.sandbox.pool.stocks import Stock
from envkit.types import CauseKind, ExecResult, FleetEvent, SandboxSpec, SandboxState
from tests.causes import cause

NODES, BOXES_PER_NODE, SPARES, TENANTS = 10, 100, 50, 7
HOUR_S = 3600.0
SPEC = SandboxSpec(cpus=0.5, memory_mib=256)
WATCH = Watch(interval_s=600, suspect_s=900, lost_s=2400)  # a probe a second would be 86 million of them


def fate(number: int, rng: random.Random) -> Fate:
    """Of ten, one does not start, three die, and one hangs, after hours."""
    draw = rng.random()
    return Fate(
        start_s=rng.uniform(0.5, 5),
        start_failure="no such image" if draw < 0.1 else None,
        dies_after_s=rng.expovariate(1 / (4 * HOUR_S)) if 0.1 <= draw < 0.4 else math.inf,
        cause=cause("it died", rng.choice([CauseKind.KILLED, CauseKind.OUT_OF_MEMORY, CauseKind.EXITED])),
        hangs_after_s=rng.expovariate(1 / (4 * HOUR_S)) if 0.4 <= draw < 0.5 else math.inf,
        answer=lambda command: ExecResult(0, duration_s=1800),
    )


@dataclass
class Day:
    """What became of it all."""

    leases: Counter[str] = field(default_factory=Counter)
    losses: dict[CauseKind, int] = field(default_factory=dict)
    ends: Counter[SandboxState] = field(default_factory=Counter)
    starts: int = 0
    failed_starts: int = 0
    longest_silence_s: float = 0.0
    left: int = 0


async def work(pool: Pool, number: int, day: Day) -> None:
    """Use one sandbox after another, for some hours each."""
    rng = random.Random(number)
    while True:
        day.leases["asked"] += 1
        try:
            async with pool.lease(SPEC, tenant=f"tenant {number % TENANTS}", wait_s=math.inf) as box:
                for _ in range(rng.randint(1, 16)):
                    asked_at = clock.now()
                    try:
                        await box.exec(["make"], timeout_s=HOUR_S)
                    finally:
                        day.longest_silence_s = max(day.longest_silence_s, clock.now() - asked_at)
            day.leases["finished"] += 1
        except SandboxLostError:
            day.leases["lost"] += 1
        except SandboxStartError:
            day.leases["not started"] += 1


async def follow(pool: Pool, seen: list[FleetEvent]) -> None:
    async for event in pool.events():
        seen.append(event)


def live(hours: float, users: int) -> Day:
    day = Day()
    seen: list[FleetEvent] = []

    async def main() -> None:
        backends = [FakeBackend(fate, seed=number) for number in range(NODES)]
        for backend in backends:
            await backend.__aenter__()
        nodes = [Node(f"node {at}", one, Holds(boxes=BOXES_PER_NODE)) for at, one in enumerate(backends)]
        budget = RestartBudget(restarts=100_000, longest_delay_s=60)
        pool = Pool(nodes, stocks=[Stock(SPEC, SPARES)], watch=WATCH, restarts=budget)
        async with anyio.create_task_group() as following, pool:
            following.start_soon(follow, pool, seen)
            with anyio.move_on_after(hours * HOUR_S):
                async with anyio.create_task_group() as tasks:
                    for number in range(users):
                        tasks.start_soon(work, pool, number, day)
                    await anyio.sleep(hours * HOUR_S / 2)
                    pool.remove_node("node 3", cause("node 3 was shut down", CauseKind.NODE_LOST))
                    await anyio.sleep(HOUR_S / 10)
                    pool.add_node(nodes[3])
        counts = pool.counts()
        day.losses, day.starts, day.failed_starts = dict(counts.losses), counts.starts, counts.failed_starts
        day.left = sum(not box.is_gone for backend in backends for box in backend.boxes) + sum(counts.states.values())
        for backend in backends:
            await backend.__aexit__(None, None, None)

    clock.run(main, virtual=True)
    states = (event.state for event in seen if event.state is not None)
    day.ends = Counter(state for state in states if state in (SandboxState.LOST, SandboxState.STOPPED))
    assert [event.number for event in seen] == list(range(1, len(seen) + 1))
    return day


def check(day: Day, users: int) -> None:
    done = day.leases["finished"] + day.leases["lost"] + day.leases["not started"]
    assert 0 <= day.leases["asked"] - done <= users, "each lease ended, or was cut off at the end of the day"
    assert day.ends.total() == day.starts, "each sandbox that was started is over, once"
    assert sum(day.losses.values()) == day.ends[SandboxState.LOST]
    assert day.left == 0
    assert day.longest_silence_s <= 1800 + WATCH.lost_s + WATCH.tick_s + WATCH.interval_s


@pytest.mark.slow
def test_a_day_of_a_thousand_failing_sandboxes_is_accounted_for() -> None:
    began_s = sum(os.times()[:2])
    day = live(24, NODES * BOXES_PER_NODE)
    check(day, NODES * BOXES_PER_NODE)
    assert day.starts > 5_000
    assert set(day.losses) == set(map(CauseKind, ("killed", "out_of_memory", "exited", "unresponsive", "node_lost")))
    assert day.losses[CauseKind.NODE_LOST] == BOXES_PER_NODE
    assert sum(os.times()[:2]) - began_s < 60  # of a processor, however many others there are to work for


def test_the_same_hours_have_the_same_counts() -> None:
    first, second = live(3, 200), live(3, 200)
    check(first, 200)
    assert first == second
