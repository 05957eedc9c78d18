"""A fleet of sandboxes that fail at random, on virtual time: each sandbox and each lease ends once."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import anyio

from envkit import clock
from envkit.errors import SandboxLostError, SandboxStartError
from envkit.restarts import RestartBudget
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import LivenessTimes
from envkit.sandbox.pool.node import Capacity, Node
from envkit.sandbox.pool.warm_stock import WarmSpec
from envkit.types import CauseKind, ExecResult, PoolEvent, SandboxSpec, SandboxState
from tests.causes import cause
from tests.sandbox.fake.backend import FakeBackend, Fate

NODES, SANDBOXES_PER_NODE, WARM, TENANTS = 10, 100, 50, 7
HOUR_S = 3600.0
SPEC = SandboxSpec(cpus=0.5, memory_mib=256)
WATCH = LivenessTimes(interval_s=600, suspect_s=900, lost_s=2400)  # one probe per second would be 86 million probes


def fate(number: int, rng: random.Random) -> Fate:
    """Of ten sandboxes, one does not start, three die and one hangs, after hours."""
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
    """Counts of one simulated day."""

    leases: Counter[str] = field(default_factory=Counter)
    losses: dict[CauseKind, int] = field(default_factory=dict)
    ends: Counter[SandboxState] = field(default_factory=Counter)
    starts: int = 0
    failed_starts: int = 0
    longest_call_s: float = 0.0
    left: int = 0
    is_numbered: bool = False
    """Whether the events had the numbers from 1 on, without gaps."""


async def work(pool: Pool, number: int, day: Day, seed: int) -> None:
    """Lease one sandbox after another, for some hours each."""
    rng = random.Random(f"{seed}: {number}")
    while True:
        day.leases["requested"] += 1
        try:
            async with pool.lease(SPEC, tenant=f"tenant {number % TENANTS}", wait_s=math.inf) as sandbox:
                for _ in range(rng.randint(1, 16)):
                    started_at = clock.now()
                    try:
                        await sandbox.exec(["make"], timeout_s=HOUR_S)
                    finally:
                        day.longest_call_s = max(day.longest_call_s, clock.now() - started_at)
            day.leases["finished"] += 1
        except SandboxLostError:
            day.leases["lost"] += 1
        except SandboxStartError:
            day.leases["not started"] += 1


async def follow(pool: Pool, seen: list[PoolEvent]) -> None:
    async for event in pool.events():
        seen.append(event)


def live(hours: float, users: int, seed: int = 0) -> Day:
    """Simulate a number of hours and return their counts; half-way, a node is removed and added again."""
    day = Day()
    seen: list[PoolEvent] = []

    async def main() -> None:
        backends = [FakeBackend(fate, seed=NODES * seed + number) for number in range(NODES)]
        for backend in backends:
            await backend.__aenter__()
        nodes = [Node(f"node {at}", one, Capacity(sandboxes=SANDBOXES_PER_NODE)) for at, one in enumerate(backends)]
        budget = RestartBudget(restarts=100_000, longest_delay_s=60)
        pool = Pool(nodes, stocks=[WarmSpec(SPEC, WARM)], liveness_times=WATCH, restarts=budget)
        async with anyio.create_task_group() as following, pool:
            following.start_soon(follow, pool, seen)
            with anyio.move_on_after(hours * HOUR_S):
                async with anyio.create_task_group() as tasks:
                    for number in range(users):
                        tasks.start_soon(work, pool, number, day, seed)
                    await anyio.sleep(hours * HOUR_S / 2)
                    pool.remove_node("node 3", cause("node 3 was shut down", CauseKind.NODE_LOST))
                    await anyio.sleep(HOUR_S / 10)
                    pool.add_node(nodes[3])
        counts = pool.counts()
        day.losses, day.starts, day.failed_starts = dict(counts.losses), counts.starts, counts.failed_starts
        day.left = sum(not sandbox.is_gone for backend in backends for sandbox in backend.sandboxes) + sum(
            counts.states.values()
        )
        for backend in backends:
            await backend.__aexit__(None, None, None)

    clock.run(main, virtual=True)
    states = (event.state for event in seen if event.state is not None)
    day.ends = Counter(state for state in states if state in (SandboxState.LOST, SandboxState.STOPPED))
    day.is_numbered = [event.number for event in seen] == list(range(1, len(seen) + 1))
    return day


def problems(day: Day, users: int) -> list[str]:
    """Return one line for each broken invariant."""
    done = day.leases["finished"] + day.leases["lost"] + day.leases["not started"]
    longest_s = 1800 + WATCH.lost_s + WATCH.tick_s + WATCH.interval_s
    holds = {
        "each lease ended, or was cut off at the end of the day": 0 <= day.leases["requested"] - done <= users,
        "each sandbox that was started is over, once": day.ends.total() == day.starts,
        "each loss was counted with its cause": sum(day.losses.values()) == day.ends[SandboxState.LOST],
        "no sandbox is left": day.left == 0,
        f"no call waited longer than {longest_s:g} s for its answer": day.longest_call_s <= longest_s,
        "events are numbered without gaps": day.is_numbered,
    }
    return [what for what, is_so in holds.items() if not is_so]
