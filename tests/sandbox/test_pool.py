"""A pool over scripted boxes, on virtual time: what is lent, to whom, for how long, and how it ends."""

from __future__ import annotations

import math
from dataclasses import replace

import anyio
import pytest

from envkit import clock
from envkit.errors import (
    CapacityError,
    ImpossibleSandboxError,
    SandboxConflictError,
    SandboxError,
    SandboxLostError,
    SandboxNotFoundError,
    SandboxStartError,
)
from envkit.protocols import Sandbox, SandboxPool
from envkit.sandbox.fake import FakeBackend, FakeBox, Fate
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.nodes import Holds, Node
from envkit.sandbox.pool.stocks import Stock
from envkit.types import ExecResult, SandboxSpec, SandboxState
from tests.sandbox.pools import SPEC, opened, run, states, told

STARTING, READY, LEASED, SUSPECT, LOST, STOPPED = SandboxState


def test_a_pool_is_one_for_the_type_checker() -> None:
    pool: SandboxPool = Pool()
    assert pool.views() == []


def test_a_lease_lends_a_sandbox_and_stops_it_before_the_block_is_left() -> None:
    async def main() -> None:
        async with opened(Fate(start_s=2)) as (pool, backend):
            async with pool.lease(SPEC, tenant="ann") as box:
                assert clock.now() == 2
                assert (await box.exec(["true"], timeout_s=5)).exit_code == 0
                view = pool.view(box.id)
                assert (view.box_id, view.node, view.tenant) == ("fake-0", "here", "ann")
            assert backend.boxes[0].is_gone
            view = pool.view(box.id)
            assert states(view) == [STARTING, LEASED, STOPPED]
            assert view.phases[-1].reason == "given back"
            with pytest.raises(SandboxLostError, match="lost: given back"):
                await box.exec(["true"], timeout_s=5)

    run(main)


def test_a_start_that_fails_raises_why_and_frees_its_place() -> None:
    async def main() -> None:
        async with opened(Fate(start_failure="no such image"), Fate(), boxes=1) as (pool, _):
            with pytest.raises(SandboxStartError, match="pool-1 did not start: no such image"):
                async with pool.lease(SPEC):
                    pytest.fail("it did not start")
            assert states(pool.view("pool-1")) == [STARTING, STOPPED]
            async with pool.lease(SPEC):
                assert pool.counts().failed_starts == 1

    run(main)


def test_a_start_that_fails_in_a_way_that_nobody_foresaw_is_no_business_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(FakeBackend):
        async def start(self, spec: SandboxSpec) -> FakeBox:
            if spec.cpus:
                raise OverflowError("cannot convert float infinity to integer")
            return await super().start(spec)

    async def main() -> None:
        async with Odd() as backend, Pool([Node("here", backend, Holds(boxes=2))]) as pool, pool.lease(SPEC) as box:
            with pytest.raises(SandboxStartError, match="OverflowError: cannot convert"):
                await pool.create("odd", SandboxSpec(cpus=1e308))
            assert (await box.exec(["true"], timeout_s=5)).exit_code == 0
            await pool.create("even", SPEC)

    run(main)
    assert "nobody foresaw" in caplog.text


def test_calls_end_with_the_cause_in_the_moment_in_which_the_box_dies() -> None:
    def answer(command: object) -> ExecResult:
        return ExecResult(0, duration_s=100)

    async def main() -> None:
        async with opened(Fate(dies_after_s=3, cause="out of memory", answer=answer)) as (pool, _):
            async with pool.lease(SPEC) as box:
                shell = box.shell()
                with pytest.raises(SandboxLostError, match="pool-1 lost: out of memory"):
                    await box.exec(["sleep", "100"], timeout_s=200)
                assert clock.now() == 3
                with pytest.raises(SandboxLostError, match="out of memory"):
                    await shell.run("true", timeout_s=1)
                assert await box.wait() == "out of memory"
                assert pool.view(box.id).state is LOST
            assert states(pool.view(box.id)) == [STARTING, LEASED, LOST]
            assert pool.counts().losses == {"out of memory": 1}

    run(main)


def test_a_lost_sandbox_stays_lost_and_nobody_gets_another_in_its_place() -> None:
    async def main() -> None:
        async with opened(Fate(dies_after_s=1)) as (pool, backend):
            await pool.create("a", SPEC)
            await anyio.sleep(5)
            with pytest.raises(SandboxLostError, match="sandbox a lost: killed by signal 9"):
                pool.get("a")
            assert states(await pool.create("a", SPEC)) == [STARTING, LEASED, LOST]
            assert len(backend.boxes) == 1

    run(main)


def test_create_can_be_repeated_also_at_the_same_moment() -> None:
    async def main() -> None:
        async with opened(Fate(start_s=3)) as (pool, backend):
            ids: list[str] = []

            async def make() -> None:
                ids.append((await pool.create("a", SPEC)).box_id)

            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(make)
            await make()
            assert ids == ["fake-0"] * 6
            assert len(backend.boxes) == 1

    run(main)


def test_a_name_is_one_sandbox_of_one_spec_and_tenant() -> None:
    async def main() -> None:
        async with opened() as (pool, _):
            await pool.create("a", SPEC, tenant="ann")
            for spec, tenant in ((replace(SPEC, memory_mib=64), "ann"), (SPEC, "bob")):
                with pytest.raises(SandboxConflictError, match="'a' is taken"):
                    await pool.create("a", spec, tenant=tenant)
            for name in ("pool-7", ""):
                with pytest.raises(SandboxConflictError, match="is not a name that can be given"):
                    await pool.create(name, SPEC)

    run(main)


def test_the_sandboxes_of_others_are_not_found() -> None:
    async def main() -> None:
        async with opened() as (pool, _):
            await pool.create("a", SPEC, tenant="ann")
            with pytest.raises(SandboxNotFoundError):
                pool.get("a", tenant="bob")
            with pytest.raises(SandboxNotFoundError):
                pool.view("a", tenant="bob")
            await pool.stop("a", tenant="bob")
            assert [view.id for view in pool.views(tenant="bob")] == []
            assert [view.id for view in pool.views(tenant="ann")] == ["a"]
            assert pool.get("a").id == pool.get("a", tenant="ann").id == "a"
            with pytest.raises(SandboxNotFoundError):
                pool.get("b")

    run(main)


def test_stop_ends_it_for_good_and_can_be_repeated() -> None:
    async def main() -> None:
        async with opened() as (pool, backend):
            await pool.create("a", SPEC)
            box = pool.get("a")
            await pool.stop("a")
            assert backend.boxes[0].is_gone
            await pool.stop("a")
            await pool.stop("never made")
            assert pool.view("a").phases[-1].reason == "stopped"
            with pytest.raises(SandboxLostError, match="stopped"):
                pool.get("a")
            with pytest.raises(SandboxLostError, match="stopped"):
                await box.read("x")
            await box.stop()

    run(main)


def test_a_name_that_was_stopped_can_be_given_again() -> None:
    async def main() -> None:
        async with opened() as (pool, backend):
            for number, spec in enumerate((SPEC, SPEC, replace(SPEC, memory_mib=64))):
                view = await pool.create("a", spec, tenant="ann")
                assert (view.box_id, view.state) == (f"fake-{number}", LEASED)
                await pool.stop("a", tenant="ann")
                assert [(view.id, view.box_id) for view in pool.views()] == [("a", f"fake-{number}")]
            assert len(backend.boxes) == 3

    run(main)


def test_a_name_whose_sandbox_was_lost_or_expired_is_free_once_its_owner_stops_it() -> None:
    async def main() -> None:
        async with opened(Fate(dies_after_s=1), Fate()) as (pool, _):
            await pool.create("a", SPEC, tenant="ann")
            await anyio.sleep(2)
            await pool.stop("a", tenant="bob")
            assert (await pool.create("a", SPEC, tenant="ann")).state is LOST
            await pool.stop("a", tenant="ann")
            assert pool.view("a").state is LOST  # it is to be seen what became of it
            assert (await pool.create("a", SPEC, tenant="ann", ttl_s=60)).state is LEASED
            await anyio.sleep(61)
            assert (await pool.create("a", SPEC, tenant="ann")).state is STOPPED
            await pool.stop("a", tenant="ann")
            assert (await pool.create("a", SPEC, tenant="ann")).state is LEASED

    run(main)


def test_a_name_whose_sandbox_never_came_up_is_tried_again() -> None:
    async def main() -> None:
        async with opened(Fate(start_failure="no image"), Fate()) as (pool, _):
            with pytest.raises(SandboxStartError, match="no image"):
                await pool.create("a", SPEC)
            assert pool.view("a").state is STOPPED
            assert (await pool.create("a", SPEC)).box_id == "fake-1"

    run(main)


def test_a_sandbox_that_nobody_uses_is_stopped_when_its_time_is_over() -> None:
    async def main() -> None:
        async with opened() as (pool, backend):
            view = await pool.create("a", SPEC, ttl_s=60)
            assert view.expires_at_s == pytest.approx(clock.wall() + 60, abs=5)
            await anyio.sleep(60.5)
            assert states(pool.view("a")) == [STARTING, LEASED, STOPPED]
            assert pool.view("a").phases[-1].reason == "time-to-live passed"
            assert pool.view("a").expires_at_s is None
            assert backend.boxes[0].is_gone

    run(main)


def test_each_use_renews_the_time_and_a_long_call_is_one_use() -> None:
    def answer(command: object) -> ExecResult:
        return ExecResult(0, duration_s=200)

    async def main() -> None:
        async with opened(Fate(answer=answer)) as (pool, _):
            await pool.create("a", SPEC, ttl_s=60)
            await anyio.sleep(50)
            box = pool.get("a")
            await anyio.sleep(50)
            await box.write("there", b"x")
            await anyio.sleep(50)
            assert (await box.exec(["make"], timeout_s=300)).exit_code == 0
            assert clock.now() == 350
            await anyio.sleep(59)
            assert pool.view("a").state is LEASED
            await anyio.sleep(2)
            assert pool.view("a").state is STOPPED

    run(main)


def test_looking_at_a_sandbox_is_no_use_of_it() -> None:
    async def main() -> None:
        async with opened() as (pool, _):
            await pool.create("a", SPEC, ttl_s=60)
            for _ in range(10):
                await anyio.sleep(10)
                pool.view("a")
                await pool.create("a", SPEC, ttl_s=60)
            assert pool.view("a").state is STOPPED

    run(main)


def test_those_that_are_over_are_seen_for_ten_minutes_and_no_more_than_a_thousand() -> None:
    async def main() -> None:
        async with opened() as (pool, _):
            await pool.create("a", SPEC)
            await pool.stop("a")
            await anyio.sleep(599)
            assert pool.view("a").state is STOPPED
            await anyio.sleep(2)
            with pytest.raises(SandboxNotFoundError):
                pool.view("a")
            for _ in range(1001):
                async with pool.lease(SPEC):
                    pass
            assert len(pool.views()) == 1000
            assert pool.views()[0].id == "pool-2"

    run(main)


def test_a_lease_waits_for_room_and_says_when_there_was_none() -> None:
    async def main() -> None:
        async with opened(boxes=1) as (pool, _):
            async with anyio.create_task_group() as tasks:
                await pool.create("a", SPEC)
                tasks.start_soon(stop_later, pool, "a", 10)
                async with pool.lease(SPEC, wait_s=20):
                    assert clock.now() == 10
                    with pytest.raises(CapacityError, match="no node has room for a further sandbox within 5 s"):
                        async with pool.lease(SPEC, wait_s=5):
                            pytest.fail("there is no room")
                    assert clock.now() == 15
                    with pytest.raises(CapacityError, match="no node has room for a further sandbox now"):
                        await pool.create("b", SPEC)
                    assert clock.now() == 15
            assert pool.counts().waiting == {}

    run(main)


async def stop_later(pool: Pool, id: str, seconds: float) -> None:
    await anyio.sleep(seconds)
    await pool.stop(id)


def test_a_request_that_no_node_could_ever_hold_is_refused_at_once() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            pool = Pool([Node("small", backend, Holds(cpus=2, memory_mib=512)), Node("large", backend, Holds(cpus=4))])
            async with pool:
                for ask in (pool.lease(SandboxSpec(cpus=8)).__aenter__(), pool.create("a", SandboxSpec(cpus=8))):
                    with pytest.raises(ImpossibleSandboxError, match=r"cpus=8 is more than any node holds: .* 4$"):
                        await ask
                assert pool.views() == []
                assert clock.now() == 0

    run(main)


def test_bounds_that_no_node_holds_together_are_impossible_too() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            nodes = [Node("a", backend, Holds(cpus=8, memory_mib=256)), Node("b", backend, Holds(cpus=1))]
            async with Pool(nodes) as pool:
                with pytest.raises(ImpossibleSandboxError, match="no node holds cpus=4, memory_mib=1024, disk_mib=256"):
                    await pool.create("a", SandboxSpec(cpus=4))

    run(main)


def test_the_least_loaded_node_gets_the_next_sandbox() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            nodes = [Node("small", backend, Holds(memory_mib=2048)), Node("large", backend, Holds(memory_mib=8192))]
            async with Pool(nodes) as pool:
                for number in range(10):
                    await pool.create(f"box {number}", SPEC)
                placed = [pool.view(f"box {number}").node for number in range(10)]
                assert placed == [*["large"] * 3, "small", *["large"] * 4, "small", "large"]
                with pytest.raises(CapacityError):
                    await pool.create("one more", SPEC)

    run(main)


def test_tenants_are_served_in_turn_and_each_in_the_order_of_arrival() -> None:
    async def main() -> None:
        served: list[str] = []
        async with opened(boxes=1) as (pool, _):

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


def test_a_tenant_has_no_more_than_it_may_and_holds_nobody_else_up() -> None:
    async def main() -> None:
        async with opened(most=2) as (pool, _):
            for name in ("a", "b"):
                await pool.create(name, SPEC, tenant="ann")
            with pytest.raises(CapacityError, match="tenant 'ann' has the 2 sandboxes that it may have at once"):
                await pool.create("c", SPEC, tenant="ann")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop_later, pool, "a", 7)
                tasks.start_soon(lease_at_once, pool, "bob")
                async with pool.lease(SPEC, tenant="ann"):
                    assert clock.now() == 7

    run(main)


def test_those_without_a_tenant_are_one_together_but_for_what_is_the_pools_own() -> None:
    async def main() -> None:
        async with opened(most=1, share=0.1, boxes=4) as (pool, _):
            await pool.create(":envs-a", SPEC)
            await pool.create("a", SPEC)
            with pytest.raises(CapacityError, match="who has no token, which is one tenant, has the 1 sandboxes"):
                await pool.create("b", SPEC)
            assert pool.wanted() < 0
            async with pool.lease(SPEC):
                await pool.create(":envs-b", SPEC)
            await pool.stop(":envs-a")
            await pool.stop("a")
            await pool.create("b", SPEC)

    run(main)


def test_a_tenant_has_no_more_than_its_share_of_all_nodes_but_always_a_first_sandbox() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            nodes = [Node(name, backend, Holds(boxes=10, memory_mib=1024, pids=4096)) for name in ("a", "b")]
            async with Pool(nodes, share=0.25) as pool:
                await pool.create("large", SandboxSpec(memory_mib=500), tenant="ann")
                why = (
                    "^tenant 'ann' has as much as one tenant may have at once: with this one, memory_mib=700 together"
                    " is more than 25% of what all nodes hold, which is 512; stop one of its sandboxes first$"
                )
                with pytest.raises(CapacityError, match=why):
                    await pool.create("small", SandboxSpec(memory_mib=200), tenant="ann")
                with pytest.raises(CapacityError, match=r"pids=4352 together is more than 25%.*which is 2048"):
                    await pool.create("many", SandboxSpec(memory_mib=1, pids=4096), tenant="ann")
                await pool.create("fits", SandboxSpec(memory_mib=12), tenant="ann")
                await pool.create("first", SandboxSpec(memory_mib=900), tenant="bob")
                await pool.stop("large", tenant="ann")
                await pool.create("small", SandboxSpec(memory_mib=200), tenant="ann")

    run(main)


def test_a_node_holds_no_more_processes_than_it_can() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool([Node("a", backend, Holds(pids=600))]) as pool:
            await pool.create("a", SPEC)
            await pool.create("b", SPEC)  # 256 each, as backends have it
            with pytest.raises(CapacityError, match="no node has room for a further sandbox now"):
                await pool.create("c", SPEC)
            with pytest.raises(ImpossibleSandboxError, match=r"pids=601 is more than any node holds: .* holds 600"):
                await pool.create("d", SandboxSpec(pids=601))
            with pytest.raises(ImpossibleSandboxError, match="pids=1234567891 is more"):
                await pool.create("d", SandboxSpec(pids=1_234_567_891))

    run(main)


async def lease_at_once(pool: Pool, tenant: str) -> None:
    async with pool.lease(SPEC, tenant=tenant, wait_s=0):
        pass


def test_who_needs_much_is_not_passed_by_for_ever() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool([Node("a", backend, Holds(cpus=2))]) as pool:
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


def test_what_is_of_no_use_to_who_has_waited_for_long_is_given_to_others() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            pool = Pool([Node("big", backend, Holds(cpus=8)), Node("small", backend, Holds(cpus=1))])
            async with pool, anyio.create_task_group() as tasks:
                await pool.create("a", SandboxSpec(cpus=7))
                tasks.start_soon(lease_later, pool, SandboxSpec(cpus=8))
                await anyio.sleep(1)
                for _ in range(60):
                    async with pool.lease(SandboxSpec(cpus=1), tenant="small", wait_s=0) as box:
                        assert pool.view(box.id).node == "small" or clock.now() < 33
                        await anyio.sleep(1)
                # What the large one could use is kept for it by now.
                async with pool.lease(SandboxSpec(cpus=1), tenant="small", wait_s=0):
                    with pytest.raises(CapacityError):
                        await pool.create("b", SandboxSpec(cpus=1), tenant="other")
                tasks.cancel_scope.cancel()

    run(main)


def test_two_who_have_waited_for_long_do_not_wait_for_each_other() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool([Node("a", backend, Holds(cpus=3))]) as pool:
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


def test_a_name_belongs_to_the_files_that_its_sandbox_began_with() -> None:
    async def main() -> None:
        async with opened() as (pool, _):
            await pool.create("a", SPEC)
            snapshot = await pool.get("a").snapshot()
            began = await pool.create("b", SPEC, snapshot=snapshot)
            assert (await pool.create("b", SPEC, snapshot=snapshot)).box_id == began.box_id
            for name, files in (("a", snapshot), ("b", None), ("b", "here/snapshot-7")):
                with pytest.raises(SandboxConflictError, match="taken by a sandbox that began with other files"):
                    await pool.create(name, SPEC, snapshot=files)

    run(main)


async def lease_later(pool: Pool, spec: SandboxSpec) -> None:
    async with pool.lease(spec, wait_s=10_000):
        pass


def test_who_waits_for_what_went_with_its_node_is_told_and_holds_nobody_up() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            pool = Pool([Node("big", backend, Holds(cpus=8)), Node("small", backend, Holds(cpus=1))])
            async with pool, anyio.create_task_group() as tasks:
                await pool.create("a", SandboxSpec(cpus=7))
                snapshot = await pool.get("a").snapshot()
                tasks.start_soon(remove_later, pool, "big")
                with pytest.raises(
                    ImpossibleSandboxError, match="cpus=8 is more than any node holds: the largest hold"
                ):
                    await lease_later(pool, SandboxSpec(cpus=8))
                assert clock.now() == 5
                with pytest.raises(SandboxStartError, match="there is no snapshot 'big/snapshot-0'"):
                    await pool.create("b", SandboxSpec(cpus=1), snapshot=snapshot)
                assert pool.counts().waiting == {}

    run(main)


class Dead(FakeBackend):
    """Starts nothing, and says so quickly or not at all."""

    is_hung = False
    tries = 0

    async def start(self, spec: SandboxSpec) -> FakeBox:
        self.tries += 1
        if self.is_hung:
            await anyio.sleep_forever()
        raise SandboxStartError("dead", "its daemon does not answer")


def test_a_node_on_which_nothing_starts_is_given_a_rest_and_what_was_to_be_there_starts_elsewhere() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Dead() as dead:
            pool = Pool([Node("dead", dead, Holds(boxes=50)), Node("well", backend, Holds(boxes=50))])
            async with pool:
                for number in range(50):
                    await pool.create(f"{number}", SPEC)
                    await anyio.sleep(1)
                assert pool.counts().failed_starts == 0
                assert {view.node for view in pool.views()} == {"well"}
                # Tries at 0, 1, 2, 3, 4, 6, 10, 17, 27, 37 and 47 s: after 0.1 s, twice that, ... and at most 10 s.
                assert dead.tries == 11
                with pytest.raises(CapacityError):
                    await pool.create("full", SPEC)
                await anyio.sleep(10)
                with pytest.raises(SandboxStartError, match="its daemon does not answer"):
                    await pool.create("full", SPEC)

    run(main)


def test_a_node_that_has_rested_is_tried_with_one_sandbox_and_used_again_when_that_starts() -> None:
    class Mended(Dead):
        async def start(self, spec: SandboxSpec) -> FakeBox:
            if clock.now() < 5:
                return await super().start(spec)
            self.tries += 1
            await anyio.sleep(2)
            return await FakeBackend.start(self, spec)

    async def main() -> None:
        async with FakeBackend() as backend, Mended() as mended:
            pool = Pool([Node("mended", mended, Holds(boxes=9)), Node("well", backend, Holds(boxes=1))])
            async with pool, anyio.create_task_group() as tasks, pool.lease(SPEC):
                await anyio.sleep(10)
                assert mended.tries == 1
                for _ in range(5):
                    tasks.start_soon(lease_later, pool, SPEC)
                await anyio.sleep(1)
                assert mended.tries == 2
                await anyio.sleep(1.5)
                assert mended.tries == 6

    run(main)


def test_the_only_node_is_used_whatever_became_of_the_start_before() -> None:
    async def main() -> None:
        async with opened(Fate(start_failure="no such image"), Fate(), boxes=1) as (pool, _):
            with pytest.raises(SandboxStartError):
                await pool.create("a", SPEC)
            await pool.create("b", SPEC)
            assert clock.now() == 0

    run(main)


def test_a_start_that_a_backend_never_ends_is_given_up() -> None:
    async def main() -> None:
        async with Dead() as dead, Pool([Node("here", dead, Holds(boxes=1))]) as pool:
            dead.is_hung = True
            with pytest.raises(SandboxStartError, match="node here did not start it within 70 s"):
                async with pool.lease(SandboxSpec(start_timeout_s=10), wait_s=5):
                    pytest.fail("it did not start")
            assert clock.now() == 70
            assert pool.views()[0].state is STOPPED

    run(main)


def test_no_more_is_wanted_than_tenants_may_have_and_further_nodes_could_give() -> None:
    async def main() -> None:
        async with opened(boxes=3, most=2) as (pool, _), anyio.create_task_group() as tasks:
            await pool.create("a", SPEC, tenant="ann")
            for number in range(2):
                await pool.create(f"b{number}", SPEC, tenant="bob")
            assert pool.wanted() == 0
            for _ in range(50):
                tasks.start_soon(lease_for, pool, "ann")
                tasks.start_soon(lease_for, pool, "bob")
            await anyio.sleep(1)
            assert pool.counts().waiting == {"ann": 50, "bob": 50}
            assert pool.wanted() == 1
            tasks.cancel_scope.cancel()

    run(main)


async def lease_for(pool: Pool, tenant: str) -> None:
    async with pool.lease(SPEC, tenant=tenant, wait_s=1000):
        pass


def test_who_gives_up_waiting_leaves_no_trace_and_its_turn_to_the_next() -> None:
    async def main() -> None:
        async with opened(boxes=1) as (pool, _):
            await pool.create("a", SPEC)
            with anyio.move_on_after(5):
                async with pool.lease(SPEC, tenant="ann"):
                    pytest.fail("there is no room")
            assert pool.counts().waiting == {}
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop_later, pool, "a", 1)
                async with pool.lease(SPEC, tenant="ann"):
                    assert len(pool.views()) == 2

    run(main)


@pytest.mark.parametrize("turns", range(12))
def test_a_create_that_is_cancelled_at_any_moment_can_be_made_again(turns: int) -> None:
    async def main() -> None:
        async with opened(Fate(start_s=1), boxes=1) as (pool, backend):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(pool.create, "a", SPEC)
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    if turns > 8:
                        await anyio.sleep(1)
                    scope.cancel()
            await anyio.sleep(0.5)
            assert (await pool.create("a", SPEC)).state is LEASED
            assert sum(not box.is_gone for box in backend.boxes) == 1
            await pool.stop("a")
            assert all(box.is_gone for box in backend.boxes)

    run(main)


@pytest.mark.parametrize("turns", range(12))
def test_a_lease_that_is_cancelled_at_any_moment_leaves_nothing_behind(turns: int) -> None:
    async def main() -> None:
        async with opened(Fate(start_s=1), boxes=1) as (pool, backend):

            async def play() -> None:
                async with pool.lease(SPEC, tenant="ann") as box:
                    await box.exec(["true"], timeout_s=1)
                    await anyio.sleep_forever()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(play)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                if turns > 6:
                    await anyio.sleep(1)
                tasks.cancel_scope.cancel()
            await anyio.sleep(0.5)
            assert all(box.is_gone for box in backend.boxes)
            assert (pool.counts().states, pool.counts().waiting) == ({}, {})
            async with pool.lease(SPEC, wait_s=0):
                pass

    run(main)


def test_a_create_with_a_wait_gets_its_turn_among_leases() -> None:
    async def main() -> None:
        async with opened(boxes=1) as (pool, _):

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


def test_what_others_find_is_told_as_an_alert_once_a_minute() -> None:
    async def main() -> None:
        async with opened() as (pool, _):
            for text in ("first", "second"):
                pool.alert("restarts", text)
            await anyio.sleep(61)
            pool.alert("restarts", "third")
            assert [event.text for event in await told(pool) if event.kind == "restarts"] == ["first", "third"]

    run(main)


def test_a_node_that_goes_takes_its_sandboxes_and_its_cause_with_it() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool() as pool:
            with pytest.raises(CapacityError, match="there are no nodes now"):
                await pool.create("a", SPEC)
            pool.add_node(Node("one", backend, Holds(boxes=1)))
            with pytest.raises(ValueError, match="there is a node 'one' already"):
                pool.add_node(Node("one", backend))
            await pool.create("a", SPEC)
            box = pool.get("a")
            pool.add_node(Node("two", backend, Holds(boxes=1)))
            await pool.create("b", SPEC)
            pool.remove_node("one", "node one was shut down")
            pool.remove_node("one", "again")
            with pytest.raises(SandboxLostError, match="a lost: node one was shut down"):
                await box.exec(["true"], timeout_s=1)
            await anyio.sleep(1)
            assert [pool.view(name).state for name in ("a", "b")] == [LOST, LEASED]
            assert backend.boxes[0].is_gone
            with pytest.raises(CapacityError):
                await pool.create("c", SPEC)
            pool.remove_node("two", "node two is on fire")
            with pytest.raises(CapacityError, match="there are no nodes now; node two is on fire"):
                await pool.create("c", SPEC)

    run(main)


def test_a_start_that_a_node_takes_with_it_has_failed() -> None:
    async def main() -> None:
        backend = FakeBackend(lambda number, rng: Fate(start_s=10))
        async with backend, Pool([Node("one", backend)]) as pool, anyio.create_task_group() as tasks:
            tasks.start_soon(remove_later, pool, "one")
            with pytest.raises(SandboxStartError, match="a did not start: gone"):
                await pool.create("a", SPEC)
            assert clock.now() == 5

    run(main)


async def remove_later(pool: Pool, name: str) -> None:
    await anyio.sleep(5)
    pool.remove_node(name, "gone")


def test_a_lease_waits_for_a_node_that_comes() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool() as pool, anyio.create_task_group() as tasks:

            async def add() -> None:
                await anyio.sleep(5)
                assert pool.wanted() == 1
                pool.add_node(Node("one", backend, Holds(boxes=3)))

            tasks.start_soon(add)
            async with pool.lease(SPEC):
                assert clock.now() == 5
                assert pool.wanted() == -2

    run(main)


def test_leaving_the_pool_stops_everything_and_ends_every_call() -> None:
    async def main() -> None:
        ends: list[str] = []

        async def play(pool: Pool, box: Sandbox) -> None:
            try:
                await box.exec(["sleep", "50"], timeout_s=100)
            except SandboxLostError as error:
                ends.append(str(error))

        def answer(command: object) -> ExecResult:
            return ExecResult(0, duration_s=50)

        async with anyio.create_task_group() as tasks:
            async with opened(Fate(answer=answer), stocks=[Stock(SandboxSpec(memory_mib=7), 3)]) as (pool, backend):
                await pool.create("a", SPEC)
                tasks.start_soon(play, pool, pool.get("a"))
                await anyio.sleep(5)
            assert all(box.is_gone for box in backend.boxes)
            assert len(backend.boxes) == 4
        assert ends == ["sandbox a lost: the pool was closed"]
        assert clock.now() == 5
        with pytest.raises(SandboxError, match="the pool is not open"):
            await pool.create("b", SPEC)

    run(main)


def test_who_waits_when_the_pool_is_closed_is_told() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks, opened(boxes=1) as (pool, _):
            await pool.create("a", SPEC)

            async def wait() -> None:
                with pytest.raises(CapacityError, match="the pool was closed"):
                    async with pool.lease(SPEC):
                        pytest.fail("there is no room")

            tasks.start_soon(wait)
            await anyio.sleep(1)

    run(main)


def test_a_cancelled_pool_stops_everything_also_what_starts() -> None:
    async def main() -> None:
        with anyio.move_on_after(3):
            async with opened(Fate(), Fate(start_s=9), stocks=[Stock(SPEC, 2)]) as (_, backend):
                await anyio.sleep_forever()
        assert clock.now() == 3
        assert all(box.is_gone for box in backend.boxes)

    run(main)


def test_an_error_in_the_block_leaves_the_pool_as_it_is() -> None:
    async def main() -> None:
        async def fail() -> None:
            async with opened() as (pool, backend):
                boxes.append(backend)
                await pool.create("a", SPEC)
                raise ZeroDivisionError

        boxes: list[FakeBackend] = []
        with pytest.raises(ZeroDivisionError):
            await fail()
        assert boxes[0].boxes[0].is_gone

    run(main)


def test_events_are_told_in_order_and_without_gaps() -> None:
    async def main() -> None:
        async with opened(Fate(dies_after_s=2), Fate()) as (pool, _):
            await pool.create("a", SPEC, tenant="ann")
            await anyio.sleep(3)
            await pool.create("b", SPEC)
            events = await told(pool)
            assert [event.number for event in events] == [1, 2, 3, 4, 5]
            assert [(event.sandbox_id, event.tenant, event.state) for event in events] == [
                ("a", "ann", STARTING),
                ("a", "ann", LEASED),
                ("a", "ann", LOST),
                ("b", "", STARTING),
                ("b", "", LEASED),
            ]
            assert events[2].text == "killed by signal 9 (SIGKILL)"

    run(main)
