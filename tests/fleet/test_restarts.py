"""A fleet replaces workers that die repeatedly, find no capacity, or cannot be stopped."""

from __future__ import annotations

import anyio
import pytest

from envkit import clock
from envkit.errors import EnvkitError, SandboxStartError
from envkit.restarts import RestartBudget
from tests.causes import cause
from tests.fleet.fleets import TASK, FakeSessionStore, ScriptedFleet, ScriptedPool, WorkerStarter, play, run
from tests.keys import key
from tests.sandbox.pool.pools import past_events


def with_store(sessions: FakeSessionStore, *, slots_per_sandbox: int = 2) -> ScriptedFleet:
    pool = ScriptedPool(WorkerStarter().start)
    return ScriptedFleet(pool, workers=1, slots_per_sandbox=slots_per_sandbox, session_store=sessions)


def test_a_worker_whose_budget_is_spent_is_restarted_when_the_oldest_failure_leaves_the_window() -> None:
    async def main() -> None:
        starter = WorkerStarter(start_s=0)
        budget = RestartBudget(restarts=2, window_s=100, first_delay_s=1)
        async with starter.fleet(1, 2, budget) as host:
            for _ in range(3):
                starter.workers[-1].die("killed by signal 9")
                await anyio.sleep(10)
            assert (starter.starts, host.waiting, host.capacity) == ([0, 1, 12], 1, 2)
            spent = "restart budget spent (2 in 100 s); next restart: in 80 s"
            (alert,) = (event.text for event in await past_events(host.pool) if event.kind == "restarts")
            assert alert.startswith(f"environment workers: {spent}; last cause: sandbox :envs-shared-")
            assert alert.endswith(" lost: killed by signal 9")
            with pytest.raises(SandboxStartError, match=r"for 30 s; last failure: .* killed by signal 9"):
                async with host.lease(TASK):
                    pytest.fail("there is no worker")
            assert clock.now() == 50
            await anyio.sleep(51)
            assert (starter.starts[3:], host.waiting) == ([100], 0)
            ends: list[str] = []
            await play(host, 1, ends)
            assert ends == ["worker-3"]

    run(main)


def test_workers_that_are_lost_at_once_are_replaced_at_once() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        async with starter.fleet(8, 1, RestartBudget(restarts=1)) as host:
            for worker in list(starter.workers):
                worker.die("the node was lost")
            await anyio.sleep(1)
            assert (len(starter.workers), host.waiting) == (16, 0)

    run(main)


def test_waiting_for_capacity_does_not_count_as_a_restart() -> None:
    async def main() -> None:
        starter = WorkerStarter()
        async with starter.fleet(1, 1, RestartBudget(restarts=1)) as host:
            host.pool.remove_node("here", cause("the node was lost"))
            await anyio.sleep(40)
            with pytest.raises(SandboxStartError, match=r"last failure: .* the pool has no nodes"):
                async with host.lease(TASK):
                    pytest.fail("there is no worker")
            await anyio.sleep(60)
            host.pool.add_node(host.pool.node)
            await anyio.sleep(1)
            ends: list[str] = []
            await play(host, 1, ends)
            assert (ends, host.waiting) == (["worker-1"], 0)

    run(main)


def test_a_lease_that_cannot_be_recorded_takes_no_slot() -> None:
    async def main() -> None:
        store = FakeSessionStore()
        async with with_store(store) as host:
            store.is_full = True
            for number in range(5):
                with pytest.raises(EnvkitError, match="the disk is full"):
                    async with host.lease_as(key(f"key {number}"), TASK):
                        pytest.fail("it is not recorded")
            store.is_full = False
            async with host.lease_as(key("a"), TASK), host.lease_as(key("b"), TASK):
                assert host.capacity == 2
            async with host.lease_as(key("c"), TASK):
                store.is_full = True
                await anyio.sleep(1)
                store.is_full = False

    run(main)


def test_a_slot_is_freed_also_when_the_end_of_its_lease_could_not_be_recorded() -> None:
    async def main() -> None:
        store = FakeSessionStore()
        async with with_store(store, slots_per_sandbox=1) as host:
            with pytest.raises(EnvkitError, match="the disk is full"):
                async with host.lease_as(key("a"), TASK):
                    store.is_full = True
            store.is_full = False
            with anyio.fail_after(1):
                async with host.lease_as(key("b"), TASK) as episode:
                    await episode.reset()

    run(main)


def test_a_worker_that_is_stopped_during_its_start_is_replaced_and_costs_no_restart() -> None:
    async def main() -> None:
        starter = WorkerStarter(start_s=5)
        async with starter.fleet(1, 1, RestartBudget(restarts=1)) as host:
            for _ in range(3):
                (view,) = [one for one in host.pool.views(tenant="") if one.state in ("starting", "leased")]
                await host.pool.stop(view.id)
                await anyio.sleep(1)
            assert (len(starter.starts), host.waiting) == (4, 0)
            await anyio.sleep(5)
            ends: list[str] = []
            await play(host, 1, ends)
            assert len(ends) == 1

    run(main)
