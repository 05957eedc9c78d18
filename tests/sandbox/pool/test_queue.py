"""The queue of a full pool of scripted sandboxes, on virtual time: order, quotas, and requests that cannot fit."""

from __future__ import annotations

import math

import anyio
import pytest

from envkit import clock
from envkit.errors import CapacityError, ImpossibleSandboxError
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.types import SandboxSpec
from tests.sandbox.fake.backend import FakeBackend
from tests.sandbox.pool.pools import SPEC, borrow, opened, run


def test_a_lease_waits_for_capacity_and_times_out() -> None:
    async def main() -> None:
        async with opened(sandboxes=1) as (pool, _):
            async with anyio.create_task_group() as tasks:
                await pool.create("a", SPEC)
                tasks.start_soon(stop_later, pool, "a", 10)
                async with pool.lease(SPEC, wait_s=20):
                    assert clock.now() == 10
                    with pytest.raises(CapacityError, match="no node had room for another sandbox within 5 s"):
                        async with pool.lease(SPEC, wait_s=5):
                            pytest.fail("there is no room")
                    assert clock.now() == 15
                    with pytest.raises(CapacityError, match="no node had room for another sandbox; retry later"):
                        await pool.create("b", SPEC)
                    assert clock.now() == 15
            assert pool.counts().waiting == {}

    run(main)


async def stop_later(pool: Pool, id: str, seconds: float, tenant: str = "") -> None:
    await anyio.sleep(seconds)
    await pool.stop(id, tenant=tenant)


def test_a_request_that_no_node_can_hold_is_rejected_at_once() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            pool = Pool(
                [Node("small", backend, Capacity(cpus=2, memory_mib=512)), Node("large", backend, Capacity(cpus=4))]
            )
            async with pool:
                for ask in (pool.lease(SandboxSpec(cpus=8)).__aenter__(), pool.create("a", SandboxSpec(cpus=8))):
                    with pytest.raises(ImpossibleSandboxError, match=r"cpus=8 exceeds every node .*largest: 4\)$"):
                        await ask
                assert pool.views() == []
                assert clock.now() == 0

    run(main)


def test_limits_that_no_node_can_hold_together_are_rejected() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            nodes = [Node("a", backend, Capacity(cpus=8, memory_mib=256)), Node("b", backend, Capacity(cpus=1))]
            async with Pool(nodes) as pool:
                with pytest.raises(ImpossibleSandboxError, match="no node has cpus=4, memory_mib=1024, disk_mib=256"):
                    await pool.create("a", SandboxSpec(cpus=4))

    run(main)


def test_the_processes_of_a_node_are_limited() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool([Node("a", backend, Capacity(pids=600))]) as pool:
            await pool.create("a", SPEC)
            await pool.create("b", SPEC)  # 256 each, as backends have it
            with pytest.raises(CapacityError, match="no node had room for another sandbox; retry later"):
                await pool.create("c", SPEC)
            with pytest.raises(ImpossibleSandboxError, match=r"pids=601 exceeds every node .*largest: 600\)"):
                await pool.create("d", SandboxSpec(pids=601))

    run(main)


def test_tenants_are_served_in_turn_each_in_order_of_arrival() -> None:
    async def main() -> None:
        served: list[str] = []
        async with opened(sandboxes=1) as (pool, _):

            async def play(tenant: str, number: int) -> None:
                async with pool.lease(SPEC, tenant=tenant, wait_s=1000):
                    served.append(f"{tenant}{number}")
                    await anyio.sleep(1)

            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(play, "a", number)
                await anyio.sleep(0.1)
                for number in range(2):
                    tasks.start_soon(play, "b", number)
                    tasks.start_soon(play, "c", number)
                await anyio.sleep(0.1)
                assert pool.counts().waiting == {"a": 3, "b": 2, "c": 2}
        assert served == ["a0", "a1", "b0", "c0", "a2", "b1", "c1", "a3"]

    run(main)


def test_a_tenant_at_its_quota_does_not_delay_others() -> None:
    async def main() -> None:
        async with opened(max_per_tenant=2) as (pool, _):
            for name in ("a", "b"):
                await pool.create(name, SPEC, tenant="ann")
            with pytest.raises(CapacityError, match="tenant 'ann' is at its limit of 2 sandboxes"):
                await pool.create("c", SPEC, tenant="ann")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop_later, pool, "a", 7, "ann")
                tasks.start_soon(borrow, pool, SPEC, "bob", 0)
                async with pool.lease(SPEC, tenant="ann"):
                    assert clock.now() == 7

    run(main)


def test_sandboxes_without_a_tenant_share_one_quota_except_those_of_the_pool() -> None:
    async def main() -> None:
        async with opened(max_per_tenant=1, share=0.1, sandboxes=4) as (pool, _):
            await pool.create(":envs-a", SPEC)
            await pool.create("a", SPEC)
            with pytest.raises(CapacityError, match="the anonymous tenant is at its limit of 1 sandboxes"):
                await pool.create("b", SPEC)
            assert pool.wanted() < 0
            async with pool.lease(SPEC):
                await pool.create(":envs-b", SPEC)
            await pool.stop(":envs-a")
            await pool.stop("a")
            await pool.create("b", SPEC)

    run(main)


def test_a_tenant_is_limited_to_its_share_of_all_nodes_but_always_gets_a_first_sandbox() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            nodes = [Node(name, backend, Capacity(sandboxes=10, memory_mib=1024, pids=4096)) for name in ("a", "b")]
            async with Pool(nodes, share=0.25) as pool:
                await pool.create("large", SandboxSpec(memory_mib=500), tenant="ann")
                why = (
                    "^tenant 'ann' is at its share of the fleet: with this sandbox, memory_mib=700"
                    " exceeds 25% of all nodes \\(limit 512\\); stop one of its sandboxes first$"
                )
                with pytest.raises(CapacityError, match=why):
                    await pool.create("small", SandboxSpec(memory_mib=200), tenant="ann")
                with pytest.raises(CapacityError, match=r"pids=4352 exceeds 25% of all nodes \(limit 2048\)"):
                    await pool.create("many", SandboxSpec(memory_mib=1, pids=4096), tenant="ann")
                await pool.create("fits", SandboxSpec(memory_mib=12), tenant="ann")
                await pool.create("first", SandboxSpec(memory_mib=900), tenant="bob")
                await pool.stop("large", tenant="ann")
                await pool.create("small", SandboxSpec(memory_mib=200), tenant="ann")

    run(main)


def test_a_large_request_is_not_starved() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool([Node("a", backend, Capacity(cpus=2))]) as pool:
            served: list[float] = []

            async def small(tenant: str) -> None:
                while not served:
                    async with pool.lease(SandboxSpec(cpus=1), tenant=tenant, wait_s=1000):
                        await anyio.sleep(1)

            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(small, f"small {number}")
                await anyio.sleep(0.5)
                async with pool.lease(SandboxSpec(cpus=2), tenant="large", wait_s=1000):
                    served.append(clock.now())
            assert 15 <= served[0] <= 40

    run(main)


def test_capacity_that_a_starving_request_cannot_use_is_given_to_others() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            pool = Pool([Node("big", backend, Capacity(cpus=8)), Node("small", backend, Capacity(cpus=1))])
            async with pool, anyio.create_task_group() as tasks:
                await pool.create("a", SandboxSpec(cpus=7))
                tasks.start_soon(borrow, pool, SandboxSpec(cpus=8))
                await anyio.sleep(1)
                for _ in range(60):
                    async with pool.lease(SandboxSpec(cpus=1), tenant="small", wait_s=0) as sandbox:
                        assert pool.view(sandbox.id, tenant="small").node == "small" or clock.now() < 33
                        await anyio.sleep(1)
                # What the large request can use is reserved for it by now.
                async with pool.lease(SandboxSpec(cpus=1), tenant="small", wait_s=0):
                    with pytest.raises(CapacityError):
                        await pool.create("b", SandboxSpec(cpus=1), tenant="other")
                tasks.cancel_scope.cancel()

    run(main)


def test_two_starving_requests_do_not_wait_for_each_other() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool([Node("a", backend, Capacity(cpus=3))]) as pool:
            served: list[str] = []

            async def lend(tenant: str, cpus: float, wait_s: float = 1000) -> None:
                async with pool.lease(SandboxSpec(cpus=cpus), tenant=tenant, wait_s=wait_s):
                    served.append(tenant)
                    await anyio.sleep(1)

            async def small(number: int) -> None:
                while len(served) < 200:
                    await lend(f"small {number}", 1)

            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(small, number)
                await anyio.sleep(0.5)
                for tenant in ("one", "two"):
                    tasks.start_soon(lend, tenant, 2.5)
            assert 32 <= served.index("one") < served.index("two") < 60

    run(main)


def test_the_wanted_capacity_is_limited_by_quotas_and_by_what_nodes_can_hold() -> None:
    async def main() -> None:
        async with opened(sandboxes=3, max_per_tenant=2) as (pool, _), anyio.create_task_group() as tasks:
            await pool.create("a", SPEC, tenant="ann")
            for number in range(2):
                await pool.create(f"b{number}", SPEC, tenant="bob")
            assert pool.wanted() == 0
            for _ in range(50):
                tasks.start_soon(borrow, pool, SPEC, "ann")
                tasks.start_soon(borrow, pool, SPEC, "bob")
            await anyio.sleep(1)
            assert pool.counts().waiting == {"ann": 50, "bob": 50}
            assert pool.wanted() == 1
            tasks.cancel_scope.cancel()

    run(main)


def test_a_create_that_waits_is_queued_with_leases() -> None:
    async def main() -> None:
        async with opened(sandboxes=1) as (pool, _):

            async def use() -> None:
                async with pool.lease(SPEC, tenant="ann", wait_s=1000):
                    await anyio.sleep(60)

            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(use)
                await anyio.sleep(1)
                with pytest.raises(CapacityError):
                    await pool.create("a", SPEC)
                await pool.create("a", SPEC, wait_s=math.inf)
                assert clock.now() < 2 * 60 + 10
                await pool.stop("a")

    run(main)
