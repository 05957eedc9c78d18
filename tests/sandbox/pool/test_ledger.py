"""Pools with a ledger: the next pool re-attaches recorded sandboxes and stops the others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from envkit.errors import CapacityError, LeaseNotPersistedError, SandboxLostError, SandboxNotFoundError
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.sandbox.pool.warm_stock import WarmSpec
from envkit.types import Phase, SandboxSpec, SandboxState, SandboxView
from tests.causes import cause
from tests.keys import key
from tests.sandbox.fake.backend import FakeBackend, FakeSandbox
from tests.sandbox.pool.pools import SPEC, FakeLedger, past_events, run, states

STARTING, READY, LEASED, SUSPECT, LOST, STOPPED = SandboxState


class Lasting(FakeSandbox):
    """A sandbox that is not stopped after the kill of its server."""

    is_orphan = False

    async def stop(self) -> None:
        if not self.is_orphan:
            await super().stop()


def lasting() -> FakeBackend:
    return FakeBackend(kind=Lasting)


@asynccontextmanager
async def opened(
    backend: FakeBackend,
    ledger: FakeLedger,
    *,
    stocks: Sequence[WarmSpec] = (),
    max_per_tenant: int | None = None,
    is_killed: bool = False,
) -> AsyncIterator[Pool]:
    """Open a pool; at the end, close it, or leave all as after a kill of its server."""
    for sandbox in backend.sandboxes:
        assert isinstance(sandbox, Lasting)
        sandbox.is_orphan = False
    async with backend:
        node = Node("here", backend)
        async with Pool([node], stocks=stocks, max_per_tenant=max_per_tenant, ledger=ledger) as pool:
            yield pool
            views = dict(ledger.views)
            for sandbox in backend.sandboxes if is_killed else ():
                assert isinstance(sandbox, Lasting)
                sandbox.is_orphan = True
    if is_killed:
        ledger.views = views


def test_a_re_attached_sandbox_counts_for_its_tenant() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger()
        async with opened(backend, ledger, is_killed=True) as pool:
            for name in (":envs-a", "a"):
                await pool.create(name, SPEC)
        async with opened(backend, ledger, max_per_tenant=2) as pool:
            await pool.create("b", SPEC)
            with pytest.raises(CapacityError, match="the anonymous tenant"):
                await pool.create("c", SPEC)
            await pool.stop("a")
            await pool.create("c", SPEC)

    run(main)


def test_a_named_sandbox_is_re_attached_with_its_history_and_time_to_live() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger()
        async with opened(backend, ledger, is_killed=True) as pool:
            await pool.create("a", SPEC, tenant="ann", ttl_s=60)
            assert ledger.views[key("a", "ann")].state is LEASED
            await pool.get("a", tenant="ann").write("there", b"x")
        async with opened(backend, ledger) as pool:
            view = pool.view("a", tenant="ann")
            assert states(view) == [STARTING, LEASED, LEASED]
            assert view.phases[-1].reason == "re-attached after a restart"
            assert (view.tenant, view.backend_id, view.node) == ("ann", "fake-0", "here")
            assert await pool.get("a", tenant="ann").read("there") == b"x"
            assert (await pool.create("a", SPEC, tenant="ann")).backend_id == "fake-0"
            with pytest.raises(SandboxNotFoundError):
                pool.get("a")
            await anyio.sleep(61)
            assert pool.view("a", tenant="ann").state is STOPPED
        assert len(backend.sandboxes) == 1

    run(main)


def test_warm_sandboxes_are_re_attached_and_those_beyond_the_stock_are_stopped() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger()
        async with opened(backend, ledger, stocks=[WarmSpec(SPEC, 3)], is_killed=True) as pool:
            await anyio.sleep(1)
        async with opened(backend, ledger, stocks=[WarmSpec(SPEC, 2)]) as pool:
            assert pool.counts().warm == 2
            await anyio.sleep(1)
            async with pool.lease(SPEC) as sandbox:
                assert sandbox.id == "pool-1"
            await anyio.sleep(1)
            assert [sandbox.is_gone for sandbox in backend.sandboxes] == [True, False, True, False]
            assert pool.view("pool-4").state is READY

    run(main)


def test_a_sandbox_that_ended_while_the_server_was_down_is_lost() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger()
        async with opened(backend, ledger, is_killed=True) as pool:
            await pool.create("a", SPEC, tenant="ann")
        backend.sandboxes[0].die(cause("killed"))
        async with opened(backend, ledger) as pool:
            assert states(pool.view("a", tenant="ann")) == [STARTING, LEASED, LOST]
            with pytest.raises(SandboxLostError, match="gone while the server was down"):
                pool.get("a", tenant="ann")
            assert [(event.sandbox_id, event.state) for event in await past_events(pool)] == [("a", LOST)]
        assert ledger.views[key("a", "ann")].state is LOST

    run(main)


def test_unrecorded_sandboxes_are_removed_before_new_ones_start() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger()
        async with backend:
            for owner in (ledger.id, ledger.id, "another", ""):
                await backend.start(SandboxSpec(detached=True, ledger=owner))
        leased = (Phase(STARTING, 1.0, ""), Phase(LEASED, 2.0, ""))
        ledger.views[key("a")] = SandboxView("a", "fake-0", "here", "", SPEC, leased)
        ledger.views[key("b")] = SandboxView("b", "", "here", "", SPEC, leased[:1])
        async with opened(backend, ledger) as pool:
            assert [sandbox.is_gone for sandbox in backend.sandboxes] == [False, True, False, False]
            await pool.create("c", SPEC)
            assert backend.sandboxes[-1].spec.ledger == ledger.id
            assert pool.view("c").spec.ledger == ""

    run(main)


class Slow(FakeBackend):
    """A backend that returns 3 s after each start and attach."""

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        sandbox = await super().start(spec)
        await anyio.sleep(3)
        return sandbox

    async def attach(self, sandbox_id: str) -> FakeSandbox:
        sandbox = await super().attach(sandbox_id)
        await anyio.sleep(3)
        return sandbox


def test_only_sandboxes_that_the_pool_does_not_know_are_removed_from_a_new_node() -> None:
    async def main() -> None:
        machine, ledger = Slow(kind=Lasting), FakeLedger()
        async with machine, Pool([Node("here", machine)], ledger=ledger) as pool:
            await pool.create("a", SPEC)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.create, "b", SPEC)
                await anyio.sleep(1)
                for owner in (ledger.id, "another", ""):
                    await FakeBackend.start(machine, SandboxSpec(detached=True, ledger=owner))
                pool.add_node(Node("sibling", machine))
                await anyio.sleep(1)
                assert pool.view("b").state is STARTING
            await anyio.sleep(4)
            assert [sandbox.is_gone for sandbox in machine.sandboxes] == [False, False, True, False, False]
            assert (await pool.get("b").probe(5), pool.view("a").state) == (0.0, LEASED)

    run(main)


def test_a_sandbox_of_a_lost_node_is_removed_when_the_node_is_back() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger()
        async with opened(backend, ledger) as pool:
            await pool.create("a", SPEC)
            (sandbox,) = backend.sandboxes
            assert isinstance(sandbox, Lasting)
            sandbox.is_orphan = True
            pool.remove_node("here", cause("it is lost"))
            await anyio.sleep(1)
            assert not sandbox.is_gone
            pool.add_node(Node("here again", backend))
            await anyio.sleep(1)
            assert sandbox.is_gone

    run(main)


def test_nodes_may_be_added_and_removed_while_sandboxes_are_re_attached() -> None:
    async def main() -> None:
        here, gone, late, ledger = Slow(kind=Lasting), Slow(kind=Lasting), lasting(), FakeLedger()
        leased = (Phase(STARTING, 1.0, ""), Phase(LEASED, 2.0, ""))
        for node, backend, count in (("here", here, 3), ("gone", gone, 3), ("late", late, 1)):
            async with backend:
                for _ in range(count):  # the last one is recorded
                    sandbox = await FakeBackend.start(backend, SandboxSpec(detached=True, ledger=ledger.id))
            ledger.views[key(node)] = SandboxView(node, sandbox.id, node, "", SPEC, leased)
        async with here, gone, late, anyio.create_task_group() as tasks:
            pool = Pool([Node("here", here), Node("gone", gone)], ledger=ledger)

            async def change() -> None:
                await anyio.sleep(1)
                pool.remove_node("gone", cause("it is lost"))
                pool.add_node(Node("late", late))

            tasks.start_soon(change)
            async with pool:
                assert [pool.view(node).state for node in ("here", "gone", "late")] == [LEASED, LOST, LOST]
                await anyio.sleep(1)
                assert [sandbox.is_gone for sandbox in here.sandboxes] == [True, True, False]
                assert [sandbox.is_gone for sandbox in late.sandboxes] == [True]

    run(main)


def test_unready_and_anonymously_leased_sandboxes_are_stopped() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger()
        async with backend:
            sandbox = await backend.start(SandboxSpec(detached=True))
        leased = (Phase(STARTING, 1.0, ""), Phase(LEASED, 2.0, ""), Phase(SUSPECT, 3.0, ""))
        ledger.views[key("pool-8")] = SandboxView("pool-8", sandbox.id, "here", "", SPEC, leased)
        ledger.views[key("b")] = SandboxView("b", "", "here", "", SPEC, leased[:1])
        async with opened(backend, ledger) as pool:
            await anyio.sleep(1)
            assert states(pool.view("b")) == [STARTING, STOPPED]
            assert pool.view("pool-8").phases[-1].reason == "the process that leased it is gone"
            assert sandbox.is_gone
            async with pool.lease(SPEC) as fresh:
                assert fresh.id == "pool-9"

    run(main)


def test_a_warm_sandbox_recorded_under_two_names_is_re_attached_under_the_new_one() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger()
        async with backend:
            sandbox = await backend.start(SandboxSpec(detached=True))
        warm = (Phase(STARTING, 1.0, ""), Phase(READY, 2.0, ""))
        ledger.views[key("pool-1")] = SandboxView("pool-1", sandbox.id, "here", "", SPEC, warm)
        ledger.views[key("a")] = SandboxView("a", sandbox.id, "here", "", SPEC, (*warm, Phase(LEASED, 3.0, "")))
        async with opened(backend, ledger, stocks=[WarmSpec(SPEC, 1)]) as pool:
            assert pool.view("a").state is LEASED
            assert pool.view("pool-1").state is LOST
            assert pool.get("a").id == "a"

    run(main)


def test_a_warm_sandbox_is_recorded_under_its_new_name_before_its_old_one_ends() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger()
        async with opened(backend, ledger, stocks=[WarmSpec(SPEC, 1)]) as pool:
            await anyio.sleep(1)
            await pool.create("a", SPEC)
            await anyio.sleep(1)
        assert ledger.order.index(("a", LEASED)) + 1 == ledger.order.index(("pool-1", STOPPED))

    run(main)


def test_a_sandbox_with_a_host_list_ends_with_the_server_whose_proxy_it_uses() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger()
        async with opened(backend, ledger, is_killed=True) as pool:
            await pool.create("a", SandboxSpec(network=("example.org",)))
            await pool.create("b", SandboxSpec(network="open"))
            assert [(sandbox.spec.detached, sandbox.spec.ledger) for sandbox in backend.sandboxes] == [
                (False, ""),
                (True, "ledger"),
            ]
        backend.sandboxes[0].die(cause("its server is gone"))
        async with opened(backend, ledger) as pool:
            assert pool.view("a").phases[-1].reason == "gone while the server was down"
            assert states(pool.view("b")) == [STARTING, LEASED, LEASED]

    run(main)


def test_a_cancelled_pool_records_the_end_of_its_sandboxes() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger(save_s=0.5)
        with anyio.move_on_after(5):
            async with opened(backend, ledger) as pool:
                await pool.create("a", SPEC)
                await pool.create("b", SPEC)
                await anyio.sleep_forever()
        assert {view.state for view in ledger.views.values()} == {STOPPED}

    run(main)


def test_a_sandbox_that_cannot_be_recorded_is_not_leased() -> None:
    async def main() -> None:
        backend, ledger = lasting(), FakeLedger()
        ledger.is_full = True
        async with opened(backend, ledger) as pool:
            with pytest.raises(LeaseNotPersistedError, match="cannot persist leases"):
                await pool.create("a", SPEC)
            events = [event for event in await past_events(pool) if event.kind == "ledger"]
            assert events[0].text == "sandbox not persisted: no space left on device"
            await anyio.sleep(1)
            assert backend.sandboxes[0].is_gone
            ledger.is_full = False
            await pool.create("a", SPEC)
            assert pool.view("a").state is LEASED

    run(main)
