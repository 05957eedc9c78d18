"""Pools under random events: their counts are right at every moment, and nothing is left at the end."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Literal, TypeAlias

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit import clock
from envkit.errors import CapacityError, SandboxConflictError, SandboxLostError, SandboxStartError
from envkit.restarts import RestartBudget
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.sandbox.pool.warm_stock import WarmSpec
from envkit.types import PoolEvent, SandboxSpec, SandboxState, TenantKey
from tests.causes import cause
from tests.sandbox.fake.backend import FakeBackend, Fate
from tests.sandbox.pool.pools import past_events

Action: TypeAlias = tuple[
    Literal["create", "lease", "cancelled lease", "stop", "kill", "pause", "resume", "wait", "remove", "add"], int
]

SPECS = [SandboxSpec(memory_mib=100), SandboxSpec(memory_mib=200), SandboxSpec(memory_mib=300)]
TENANTS = ["ann", "bob"]
MOST, SANDBOXES = 3, 3
OVER = (SandboxState.LOST, SandboxState.STOPPED)
KINDS = ["create", "lease", "cancelled lease", "stop", "kill", "pause", "resume", "wait", "remove", "add"]
REFUSALS = (CapacityError, SandboxConflictError, SandboxLostError, SandboxStartError)


class Play:
    """A pool of two nodes, and the actions on it."""

    def __init__(self, pool: Pool, backends: list[FakeBackend], tasks: anyio.abc.TaskGroup) -> None:
        self.pool = pool
        self.backends = backends
        self.nodes = [new_node(at, backend) for at, backend in enumerate(backends)]
        self.tasks = tasks

    async def do(self, action: Action) -> None:
        kind, number = action
        sandboxes = [sandbox for backend in self.backends for sandbox in backend.sandboxes if not sandbox.is_gone]
        if kind == "create":
            self.tasks.start_soon(self.create, number)
        elif kind == "lease":
            self.tasks.start_soon(self.lease, number, 7.0)
        elif kind == "cancelled lease":
            self.tasks.start_soon(self.lease, number, 0.3)
        elif kind == "stop":
            self.tasks.start_soon(partial(self.pool.stop, f"name {number % 4}", tenant=TENANTS[number % 2]))
        elif kind == "wait":
            await anyio.sleep(number % 50 / 10)
        elif kind == "remove":
            self.pool.remove_node(f"node {number % 2}", cause("it was removed"))
        elif kind == "add":
            node = self.nodes[number % 2] = new_node(number % 2, self.backends[number % 2])
            self.pool.remove_node(node.name, cause("it was replaced"))
            self.pool.add_node(node)
        elif sandboxes:
            sandbox = sandboxes[number % len(sandboxes)]
            {"kill": lambda: sandbox.die(cause("killed")), "pause": sandbox.pause, "resume": sandbox.resume}[kind]()
        await anyio.lowlevel.checkpoint()

    async def create(self, number: int) -> None:
        try:
            name, tenant = f"name {number % 4}", TENANTS[number % 2]
            await self.pool.create(name, SPECS[number % 3], tenant=tenant, ttl_s=[None, 5.0][number % 2])
            await self.pool.get(name, tenant=tenant).write("x", b"x")
        except REFUSALS:
            pass

    async def lease(self, number: int, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            try:
                async with self.pool.lease(SPECS[number % 3], tenant=TENANTS[number % 2], wait_s=4) as sandbox:
                    while True:
                        await sandbox.exec(["true"], timeout_s=1)
                        await anyio.sleep(0.5)
            except REFUSALS:
                pass

    def check(self) -> None:
        """Check the invariants."""
        alive = [view for view in self.pool.views() if view.state not in OVER]
        held = Counter(view.tenant for view in alive if view.tenant)
        assert all(count <= MOST for count in held.values())
        for node in self.nodes:
            assert 0 <= node.used.sandboxes <= SANDBOXES
            assert 0 <= node.used.memory_mib <= 600
        assert sum(self.pool.counts().states.values()) == len(alive)


def new_node(at: int, backend: FakeBackend) -> Node:
    return Node(f"node {at}", backend, Capacity(sandboxes=SANDBOXES, memory_mib=600))


def is_allowed(events: list[PoolEvent]) -> bool:
    """Whether an ended sandbox has no further events, unless it starts again or a warm one takes its name."""
    over: set[TenantKey] = set()
    for event in events:
        one = TenantKey(event.tenant, event.sandbox_id)
        if event.state is SandboxState.STARTING or event.text.startswith("leased; was warm as"):
            over.discard(one)
        elif event.state is not None and one in over:
            return False
        if event.state in OVER:
            over.add(one)
    return True


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 59)), max_size=40))
def test_counts_are_right_after_each_action_and_nothing_is_left(actions: list[Action]) -> None:
    async def main() -> None:
        backends = [FakeBackend(lambda number, rng: Fate(start_s=rng.uniform(0, 2)), seed=at) for at in range(2)]
        async with backends[0], backends[1]:
            budget = RestartBudget(restarts=3, window_s=30)
            pool = Pool(stocks=[WarmSpec(SPECS[0], 2)], max_per_tenant=MOST, restarts=budget)
            async with anyio.create_task_group() as tasks, pool:
                play = Play(pool, backends, tasks)
                for node in play.nodes:
                    pool.add_node(node)
                for action in actions:
                    await play.do(action)
                    play.check()
                assert is_allowed(await past_events(pool))
                await anyio.sleep(40)
                play.check()
                assert pool.counts().waiting == {}
            assert pool.counts().states == {}
            assert all(sandbox.is_gone for backend in backends for sandbox in backend.sandboxes)
            assert all(node.used == (0, 0.0, 0, 0, 0) for node in play.nodes)

    clock.run(main, virtual=True)
