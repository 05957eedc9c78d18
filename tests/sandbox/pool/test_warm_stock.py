"""Warm sandboxes: leased at once, and replaced within the restart budget."""

from __future__ import annotations

import anyio
import pytest

from envkit import clock
from envkit.errors import CapacityError, SandboxError
from envkit.protocols import Sandbox
from envkit.restarts import RestartBudget
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.sandbox.pool.warm_stock import WarmSpec
from envkit.types import CauseKind, SandboxSpec, SandboxState
from tests.causes import cause
from tests.sandbox.fake.backend import FakeBackend, Fate
from tests.sandbox.pool.pools import SPEC, opened, past_events, run, states

STARTING, READY, LEASED, SUSPECT, LOST, STOPPED = SandboxState
OTHER = SandboxSpec(command=("serve",))


def test_a_warm_sandbox_is_leased_at_once_and_replaced_in_the_background() -> None:
    async def main() -> None:
        async with opened(Fate(start_s=3), stocks=[WarmSpec(SPEC, 2)]) as (pool, backend):
            await anyio.sleep(5)
            assert pool.counts().warm == 2
            began = clock.now()
            async with pool.lease(SPEC, tenant="ann") as sandbox:
                assert clock.now() == began
                view = pool.view(sandbox.id, tenant="ann")
                assert states(view) == [STARTING, READY, LEASED]
                await anyio.sleep(3.1)
                assert pool.counts().warm == 2
                assert len(backend.sandboxes) == 3
            view = await pool.create("a", SPEC, ttl_s=9)
            assert clock.now() == began + 3.1
            assert view.phases[-1].reason == "leased; was warm as pool-2"
            assert pool.get("a").id == "a"

    run(main)


def test_a_warm_sandbox_is_leased_only_after_it_is_booted() -> None:
    booted: list[str] = []

    async def boot(sandbox: Sandbox) -> None:
        await anyio.sleep(4)
        booted.append(sandbox.id)

    async def main() -> None:
        async with opened(sandboxes=1, stocks=[WarmSpec(SPEC, 1, boot)]) as (pool, _), pool.lease(SPEC) as sandbox:
            assert clock.now() == 4
            assert booted == [pool.view(sandbox.id).backend_id] == ["fake-0"]

    run(main)


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_warm_sandbox_that_cannot_be_booted_is_stopped(is_slow: bool) -> None:
    async def boot(sandbox: Sandbox) -> None:
        if is_slow:
            await anyio.sleep_forever()
        raise SandboxError("its server does not answer")

    async def main() -> None:
        budget = RestartBudget(restarts=1, window_s=100)
        async with opened(stocks=[WarmSpec(SPEC, 1, boot)], restarts=budget) as (pool, backend):
            await anyio.sleep(70)
            assert [sandbox.is_gone for sandbox in backend.sandboxes] == [True, True]
            reason = "not booted within 30 s" if is_slow else "its server does not answer"
            assert pool.views()[0].phases[-1].reason == reason

    run(main)


def test_warm_sandboxes_that_fail_are_replaced_within_the_budget_of_each_window() -> None:
    async def main() -> None:
        budget = RestartBudget(restarts=3, window_s=100, first_delay_s=1, longest_delay_s=3)
        async with opened(Fate(start_failure="no image"), stocks=[WarmSpec(SPEC, 1)], restarts=budget) as (pool, _):
            await anyio.sleep(50)
            # Starts at 0, 1, 3 and 6 s.
            assert (pool.counts().starts, pool.counts().failed_starts, pool.counts().restarts) == (4, 4, 3)
            (event,) = (event for event in await past_events(pool) if event.kind == "restarts")
            spent = "warm stock of bare sandboxes: restart budget spent (3 in 100 s)"
            assert event.text == f"{spent}; next restart: in 94 s; last cause: no image"
            await anyio.sleep(51)
            assert pool.counts().starts == 5

    run(main)


def test_the_spec_of_a_warm_sandbox_may_not_have_a_time_to_live() -> None:
    with pytest.raises(ValueError, match="ttl_s=60 is refused"):
        WarmSpec(SandboxSpec(ttl_s=60), 1)


def test_a_warm_sandbox_that_dies_is_lost_and_replaced() -> None:
    async def main() -> None:
        async with opened(Fate(dies_after_s=5), Fate(start_s=1), stocks=[WarmSpec(SPEC, 1)]) as (pool, _):
            await anyio.sleep(6.2)
            assert [states(view) for view in pool.views()] == [[STARTING, READY, LOST], [STARTING, READY]]
            assert pool.counts().restarts == 1

    run(main)


def test_warm_sandboxes_are_evicted_for_other_requests() -> None:
    async def main() -> None:
        async with opened(sandboxes=3, stocks=[WarmSpec(SPEC, 2)]) as (pool, backend):
            await anyio.sleep(1)
            await pool.create("a", OTHER)
            await pool.create("b", OTHER)
            assert [view.id for view in pool.views() if view.state in (READY, LEASED)] == ["pool-2", "a", "b"]
            reasons = [view.phases[-1].reason for view in pool.views() if view.state is STOPPED]
            assert reasons == ["evicted to make room"]
            await pool.create("c", OTHER)
            with pytest.raises(CapacityError):
                await pool.create("d", OTHER)
            assert pool.counts().warm == 0
            assert pool.wanted() == 2
            await pool.stop("a")
            await pool.stop("b")
            await anyio.sleep(1)
            assert pool.counts().warm == 2
            assert sum(not sandbox.is_gone for sandbox in backend.sandboxes) == 3

    run(main)


def test_as_few_warm_sandboxes_as_possible_are_evicted() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            small, large = SandboxSpec(memory_mib=1), SandboxSpec(memory_mib=1000)
            pool = Pool(
                [Node("a", backend, Capacity(memory_mib=1100))], stocks=[WarmSpec(small, 100), WarmSpec(large, 1)]
            )
            async with pool:
                await anyio.sleep(1)
                await pool.create("a", SandboxSpec(memory_mib=900))
                await anyio.sleep(1)
                assert pool.counts().warm == 100

    run(main)


def test_a_waiting_request_gets_a_sandbox_that_starts_for_the_stock() -> None:
    async def main() -> None:
        async with opened(Fate(start_s=5), sandboxes=1, stocks=[WarmSpec(SPEC, 1)]) as (pool, backend):
            await anyio.sleep(1)
            await pool.create("a", SPEC)
            assert clock.now() == 5
            assert len(backend.sandboxes) == 1

    run(main)


def test_a_stock_that_no_node_can_hold_is_an_alert() -> None:
    async def main() -> None:
        async with opened(sandboxes=1, stocks=[WarmSpec(SPEC, 1)]) as (pool, _):
            assert [event.kind for event in await past_events(pool)] == ["state", "state"]
        async with FakeBackend() as backend:
            node = Node("a", backend, Capacity(memory_mib=64))
            async with Pool([node], stocks=[WarmSpec(OTHER, 1)]) as pool:
                (event,) = await past_events(pool)
                assert event.kind == "stock"
                assert event.text.startswith("cannot keep a warm stock of serve: memory_mib=1024 exceeds every node")
                assert pool.wanted() == 0

    run(main)


def test_stocks_are_filled_on_nodes_without_waiting_requests() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            big, small = Node("big", backend, Capacity(cpus=8)), Node("small", backend, Capacity(cpus=2))
            async with (
                Pool([big], stocks=[WarmSpec(SandboxSpec(cpus=1), 4)]) as pool,
                anyio.create_task_group() as tasks,
            ):
                await pool.create("a", SandboxSpec(cpus=6))
                await pool.create("b", SandboxSpec(cpus=2))
                tasks.start_soon(lease_large, pool)
                await anyio.sleep(1)
                pool.add_node(small)
                await pool.stop("b")
                await anyio.sleep(1)
                assert [view.node for view in pool.views() if view.state is READY] == ["small"] * 2
                tasks.cancel_scope.cancel()

    run(main)


async def lease_large(pool: Pool) -> None:
    async with pool.lease(SandboxSpec(cpus=8), wait_s=1000):
        pass


def test_warm_sandboxes_of_a_removed_node_are_replaced_elsewhere_without_using_the_budget() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool([Node("a", backend)], stocks=[WarmSpec(SPEC, 3)]) as pool:
            await anyio.sleep(1)
            pool.add_node(Node("b", backend))
            pool.remove_node("a", cause("gone", CauseKind.NODE_LOST))
            await anyio.sleep(1)
            assert [view.node for view in pool.views() if view.state is READY] == ["b"] * 3
            assert pool.counts().restarts == 0
            assert pool.counts().losses == {"node_lost": 3}

    run(main)
