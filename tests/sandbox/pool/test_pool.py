"""A pool over scripted sandboxes, on virtual time: leases, names, times to live, and ends."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxConflictError, SandboxLostError, SandboxNotFoundError, SandboxStartError
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.types import CauseKind, ExecResult, SandboxSpec, SandboxState
from tests.causes import cause
from tests.keys import key
from tests.sandbox.fake.backend import FakeBackend, FakeSandbox, Fate
from tests.sandbox.pool.pools import SPEC, FakeLedger, opened, past_events, run, states

STARTING, READY, LEASED, SUSPECT, LOST, STOPPED = SandboxState


def test_a_lease_stops_its_sandbox_before_the_block_ends() -> None:
    async def main() -> None:
        async with opened(Fate(start_s=2)) as (pool, backend):
            async with pool.lease(SPEC, tenant="ann") as sandbox:
                assert clock.now() == 2
                assert (await sandbox.exec(["true"], timeout_s=5)).exit_code == 0
                view = pool.view(sandbox.id, tenant="ann")
                assert (view.backend_id, view.node, view.tenant) == ("fake-0", "here", "ann")
            assert backend.sandboxes[0].is_gone
            view = pool.view(sandbox.id, tenant="ann")
            assert states(view) == [STARTING, LEASED, STOPPED]
            assert view.phases[-1].reason == "released"
            with pytest.raises(SandboxLostError, match="lost: released"):
                await sandbox.exec(["true"], timeout_s=5)

    run(main)


def test_a_start_that_fails_raises_its_cause_and_frees_its_capacity() -> None:
    async def main() -> None:
        async with opened(Fate(start_failure="no such image"), Fate(), sandboxes=1) as (pool, _):
            with pytest.raises(SandboxStartError, match="pool-1 did not start: no such image"):
                async with pool.lease(SPEC):
                    pytest.fail("it did not start")
            assert states(pool.view("pool-1")) == [STARTING, STOPPED]
            async with pool.lease(SPEC):
                assert pool.counts().failed_starts == 1

    run(main)


def test_an_unhandled_exception_of_a_start_does_not_affect_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(FakeBackend):
        async def start(self, spec: SandboxSpec) -> FakeSandbox:
            if spec.cpus:
                raise OverflowError("cannot convert float infinity to integer")
            return await super().start(spec)

    async def main() -> None:
        async with (
            Odd() as backend,
            Pool([Node("here", backend, Capacity(sandboxes=2))]) as pool,
            pool.lease(SPEC) as sandbox,
        ):
            with pytest.raises(SandboxStartError, match="OverflowError: cannot convert"):
                await pool.create("odd", SandboxSpec(cpus=1e308))
            assert (await sandbox.exec(["true"], timeout_s=5)).exit_code == 0
            await pool.create("even", SPEC)

    run(main)
    assert "unhandled exception" in caplog.text


def test_calls_raise_the_cause_as_soon_as_the_sandbox_dies() -> None:
    def answer(command: object) -> ExecResult:
        return ExecResult(0, duration_s=100)

    async def main() -> None:
        async with opened(
            Fate(dies_after_s=3, cause=cause("out of memory", CauseKind.OUT_OF_MEMORY), answer=answer)
        ) as (pool, _):
            async with pool.lease(SPEC) as sandbox:
                shell = sandbox.shell()
                with pytest.raises(SandboxLostError, match="pool-1 lost: out of memory"):
                    await sandbox.exec(["sleep", "100"], timeout_s=200)
                assert clock.now() == 3
                with pytest.raises(SandboxLostError, match="out of memory"):
                    await shell.run("true", timeout_s=1)
                assert str(await sandbox.wait()) == "out of memory"
                assert pool.view(sandbox.id).state is LOST
            assert states(pool.view(sandbox.id)) == [STARTING, LEASED, LOST]
            assert pool.counts().losses == {"out_of_memory": 1}

    run(main)


def test_a_sandbox_whose_command_has_exited_is_finished_and_not_lost() -> None:
    async def main() -> None:
        async with opened(Fate(dies_after_s=3, cause=cause("exited with code 0", CauseKind.EXITED))) as (pool, _):
            await pool.create("a", replace(SPEC, command=("sleep", "3")))
            await pool.create("b", SPEC)
            await pool.create(":envs-1", replace(SPEC, command=("serve",)))
            await anyio.sleep(4)
            assert pool.counts().finished == 1
            assert pool.counts().losses == {"exited": 2}

    run(main)


def test_a_lost_sandbox_remains_lost_and_is_not_replaced_under_its_name() -> None:
    async def main() -> None:
        async with opened(Fate(dies_after_s=1)) as (pool, backend):
            await pool.create("a", SPEC)
            await anyio.sleep(5)
            with pytest.raises(SandboxLostError, match="sandbox a lost: killed by signal 9"):
                pool.get("a")
            assert states(await pool.create("a", SPEC)) == [STARTING, LEASED, LOST]
            assert len(backend.sandboxes) == 1

    run(main)


def test_create_can_be_repeated_also_at_the_same_moment() -> None:
    async def main() -> None:
        async with opened(Fate(start_s=3)) as (pool, backend):
            ids: list[str] = []

            async def make() -> None:
                ids.append((await pool.create("a", SPEC)).backend_id)

            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(make)
            await make()
            assert ids == ["fake-0"] * 6
            assert len(backend.sandboxes) == 1

    run(main)


def test_a_name_belongs_to_one_sandbox_of_one_spec() -> None:
    async def main() -> None:
        async with opened() as (pool, _):
            await pool.create("a", SPEC, tenant="ann")
            with pytest.raises(SandboxConflictError, match="'a' is taken"):
                await pool.create("a", replace(SPEC, memory_mib=64), tenant="ann")
            for name in ("pool-7", ""):
                with pytest.raises(SandboxConflictError, match="is not a valid id"):
                    await pool.create(name, SPEC)

    run(main)


def test_two_tenants_use_one_id_for_two_sandboxes() -> None:
    async def main() -> None:
        ledger = FakeLedger()
        async with opened(Fate(dies_after_s=9), Fate(), ledger=ledger) as (pool, _):
            for tenant in ("ann", "bob"):
                view = await pool.create("a", SPEC, tenant=tenant)
                assert (view.id, view.tenant, pool.get("a", tenant=tenant).id) == ("a", tenant, "a")
            await anyio.sleep(10)
            assert [pool.view("a", tenant=tenant).state for tenant in ("ann", "bob")] == [LOST, LEASED]
            assert list(ledger.views) == [key("a", "ann"), key("a", "bob")]
            with pytest.raises(SandboxLostError, match="sandbox a lost: killed by signal 9"):
                pool.get("a", tenant="ann")
            await pool.stop("a", tenant="ann")
            assert pool.get("a", tenant="bob").id == "a"
            lost = {(event.tenant, event.sandbox_id) for event in await past_events(pool) if event.state is LOST}
            assert lost == {("ann", "a")}

    run(main)


def test_stop_can_be_repeated() -> None:
    async def main() -> None:
        async with opened() as (pool, backend):
            await pool.create("a", SPEC)
            sandbox = pool.get("a")
            await pool.stop("a")
            assert backend.sandboxes[0].is_gone
            await pool.stop("a")
            await pool.stop("never created")
            assert pool.view("a").phases[-1].reason == "stopped"
            with pytest.raises(SandboxLostError, match="stopped"):
                pool.get("a")
            with pytest.raises(SandboxLostError, match="stopped"):
                await sandbox.read("x")
            await sandbox.stop()

    run(main)


def test_a_name_whose_sandbox_was_lost_or_expired_is_free_once_its_owner_stops_it() -> None:
    async def main() -> None:
        async with opened(Fate(dies_after_s=1), Fate()) as (pool, _):
            await pool.create("a", SPEC, tenant="ann")
            await anyio.sleep(2)
            await pool.stop("a", tenant="bob")
            assert (await pool.create("a", SPEC, tenant="ann")).state is LOST
            await pool.stop("a", tenant="ann")
            assert pool.view("a", tenant="ann").state is LOST  # its end is still visible
            assert (await pool.create("a", SPEC, tenant="ann", ttl_s=60)).state is LEASED
            await anyio.sleep(61)
            assert (await pool.create("a", SPEC, tenant="ann")).state is STOPPED
            await pool.stop("a", tenant="ann")
            assert (await pool.create("a", SPEC, tenant="ann")).state is LEASED

    run(main)


def test_an_unused_sandbox_is_stopped_after_its_time_to_live() -> None:
    async def main() -> None:
        async with opened() as (pool, backend):
            view = await pool.create("a", SPEC, ttl_s=60)
            assert view.expires_at_s == pytest.approx(clock.wall() + 60, abs=5)
            for _ in range(11):  # neither renews it
                await anyio.sleep(5.5)
                pool.view("a")
                await pool.create("a", SPEC, ttl_s=60)
            assert states(pool.view("a")) == [STARTING, LEASED, STOPPED]
            assert pool.view("a").phases[-1].reason == "time-to-live passed"
            assert pool.view("a").expires_at_s is None
            assert backend.sandboxes[0].is_gone

    run(main)


def test_each_call_renews_the_time_to_live_also_a_long_one() -> None:
    def answer(command: object) -> ExecResult:
        return ExecResult(0, duration_s=200)

    async def main() -> None:
        async with opened(Fate(answer=answer)) as (pool, _):
            await pool.create("a", SPEC, ttl_s=60)
            await anyio.sleep(50)
            sandbox = pool.get("a")
            await anyio.sleep(50)
            await sandbox.write("there", b"x")
            await anyio.sleep(50)
            assert (await sandbox.exec(["make"], timeout_s=300)).exit_code == 0
            assert clock.now() == 350
            await anyio.sleep(59)
            assert pool.view("a").state is LEASED
            await anyio.sleep(2)
            assert pool.view("a").state is STOPPED

    run(main)


def test_up_to_a_thousand_ended_sandboxes_are_visible_for_ten_minutes() -> None:
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


def test_a_name_belongs_to_the_snapshot_of_its_sandbox() -> None:
    async def main() -> None:
        async with opened() as (pool, _):
            await pool.create("a", SPEC)
            snapshot = await pool.get("a").snapshot()
            began = await pool.create("b", SPEC, snapshot=snapshot)
            assert (await pool.create("b", SPEC, snapshot=snapshot)).backend_id == began.backend_id
            for name, files in (("a", snapshot), ("b", None), ("b", "here/snapshot-7")):
                with pytest.raises(SandboxConflictError, match="taken by a sandbox from another snapshot"):
                    await pool.create(name, SPEC, snapshot=files)

    run(main)


def test_events_are_in_order_and_without_gaps() -> None:
    async def main() -> None:
        async with opened(Fate(dies_after_s=2), Fate()) as (pool, _):
            await pool.create("a", SPEC, tenant="ann")
            await anyio.sleep(3)
            await pool.create("b", SPEC)
            events = await past_events(pool)
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
