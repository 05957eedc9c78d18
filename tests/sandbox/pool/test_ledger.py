"""Pools whose sandboxes are written down: what the next one finds of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from envkit import clock
from envkit.errors import CapacityError, LeaseNotPersistedError, SandboxConflictError, SandboxLostError
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.events import LedgerStore, LedgerWriter
from envkit.sandbox.pool.node import Node
from envkit.sandbox.pool.warm_stock import WarmSpec
from envkit.types import Phase, SandboxSpec, SandboxState, SandboxView
from tests.causes import cause
from tests.sandbox.fake.backend import FakeBackend, FakeSandbox
from tests.sandbox.pool.pools import SPEC, Book, run, states, told

STARTING, READY, LEASED, SUSPECT, LOST, STOPPED = SandboxState


class Lasting(FakeSandbox):
    """A box whose server can be killed: nobody stops it then."""

    is_alone = False

    async def stop(self) -> None:
        if not self.is_alone:
            await super().stop()


def lasting() -> FakeBackend:
    return FakeBackend(kind=Lasting)


@asynccontextmanager
async def opened(
    backend: FakeBackend,
    book: Book,
    *,
    stocks: Sequence[WarmSpec] = (),
    most: int | None = None,
    is_killed: bool = False,
) -> AsyncIterator[Pool]:
    """Open a pool; in the end it is closed, or as if its server had been killed."""
    ledger: LedgerStore = book
    for box in backend.boxes:
        assert isinstance(box, Lasting)
        box.is_alone = False
    async with backend:
        node = Node("here", backend)
        async with Pool([node], stocks=stocks, most=most, ledger=ledger) as pool:
            yield pool
            pages = dict(book.pages)
            for box in backend.boxes if is_killed else ():
                assert isinstance(box, Lasting)
                box.is_alone = True
    if is_killed:
        book.pages = pages


def test_what_is_found_again_counts_as_whose_it_was() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        async with opened(backend, book, is_killed=True) as pool:
            for name in (":envs-a", "a"):
                await pool.create(name, SPEC)
        async with opened(backend, book, most=2) as pool:
            await pool.create("b", SPEC)
            with pytest.raises(CapacityError, match="the anonymous tenant"):
                await pool.create("c", SPEC)
            await pool.stop("a")
            await pool.create("c", SPEC)

    run(main)


def test_what_is_named_is_found_again_with_its_history_and_time_to_live() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        async with opened(backend, book, is_killed=True) as pool:
            await pool.create("a", SPEC, tenant="ann", ttl_s=60)
            assert book.pages["a"].state is LEASED
            await pool.get("a").write("there", b"x")
        async with opened(backend, book) as pool:
            view = pool.view("a")
            assert states(view) == [STARTING, LEASED, LEASED]
            assert view.phases[-1].reason == "re-attached after a restart"
            assert (view.tenant, view.backend_id, view.node) == ("ann", "fake-0", "here")
            assert await pool.get("a").read("there") == b"x"
            assert (await pool.create("a", SPEC, tenant="ann")).backend_id == "fake-0"
            with pytest.raises(SandboxConflictError):
                await pool.create("a", SPEC)
            await anyio.sleep(61)
            assert pool.view("a").state is STOPPED
        assert len(backend.boxes) == 1

    run(main)


def test_spares_are_found_again_and_those_that_no_stock_wants_are_stopped() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        async with opened(backend, book, stocks=[WarmSpec(SPEC, 3)], is_killed=True) as pool:
            await anyio.sleep(1)
        async with opened(backend, book, stocks=[WarmSpec(SPEC, 2)]) as pool:
            assert pool.counts().warm == 2
            await anyio.sleep(1)
            async with pool.lease(SPEC) as box:
                assert box.id == "pool-1"
            await anyio.sleep(1)
            assert [box.is_gone for box in backend.boxes] == [True, False, True, False]
            assert pool.view("pool-4").state is READY

    run(main)


def test_what_is_gone_meanwhile_is_lost() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        async with opened(backend, book, is_killed=True) as pool:
            await pool.create("a", SPEC, tenant="ann")
        backend.boxes[0].die(cause("killed"))
        async with opened(backend, book) as pool:
            assert states(pool.view("a")) == [STARTING, LEASED, LOST]
            with pytest.raises(SandboxLostError, match="gone while the server was down"):
                pool.get("a", tenant="ann")
            assert [(event.sandbox_id, event.state) for event in await told(pool)] == [("a", LOST)]
        assert book.pages["a"].state is LOST

    run(main)


def test_what_was_started_and_not_written_down_yet_is_ended_before_anything_else_is_started() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        async with backend:
            for ledger in (book.id, book.id, "another", ""):
                await backend.start(SandboxSpec(detached=True, ledger=ledger))
        lent = (Phase(STARTING, 1.0, ""), Phase(LEASED, 2.0, ""))
        book.pages["a"] = SandboxView("a", "fake-0", "here", "", SPEC, lent)
        book.pages["b"] = SandboxView("b", "", "here", "", SPEC, lent[:1])
        async with opened(backend, book) as pool:
            assert [box.is_gone for box in backend.boxes] == [False, True, False, False]
            await pool.create("c", SPEC)
            assert backend.boxes[-1].spec.ledger == book.id
            assert pool.view("c").spec.ledger == ""

    run(main)


class Slow(FakeBackend):
    """One that answers only some time after it has done what it was asked for."""

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        box = await super().start(spec)
        await anyio.sleep(3)
        return box

    async def attach(self, sandbox_id: str) -> FakeSandbox:
        box = await super().attach(sandbox_id)
        await anyio.sleep(3)
        return box


def test_a_node_that_joins_is_cleared_of_what_the_pool_does_not_know_and_of_nothing_else() -> None:
    async def main() -> None:
        machine, book = Slow(kind=Lasting), Book()
        async with machine, Pool([Node("here", machine)], ledger=book) as pool:
            await pool.create("a", SPEC)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.create, "b", SPEC)
                await anyio.sleep(1)
                for ledger in (book.id, "another", ""):
                    await FakeBackend.start(machine, SandboxSpec(detached=True, ledger=ledger))
                pool.add_node(Node("sibling", machine))
                await anyio.sleep(1)
                assert pool.view("b").state is STARTING
            await anyio.sleep(4)
            assert [box.is_gone for box in machine.boxes] == [False, False, True, False, False]
            assert (await pool.get("b").probe(5), pool.view("a").state) == (0.0, LEASED)

    run(main)


def test_what_ran_on_a_node_that_was_lost_is_ended_when_its_machine_is_back() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        async with opened(backend, book) as pool:
            await pool.create("a", SPEC)
            (box,) = backend.boxes
            assert isinstance(box, Lasting)
            box.is_alone = True
            pool.remove_node("here", cause("it is lost"))
            await anyio.sleep(1)
            assert not box.is_gone
            pool.add_node(Node("here again", backend))
            await anyio.sleep(1)
            assert box.is_gone

    run(main)


def test_nodes_that_come_and_go_while_a_server_takes_back_what_was_left_are_cleared_and_lost() -> None:
    async def main() -> None:
        here, gone, late, book = Slow(kind=Lasting), Slow(kind=Lasting), lasting(), Book()
        lent = (Phase(STARTING, 1.0, ""), Phase(LEASED, 2.0, ""))
        for node, backend, count in (("here", here, 3), ("gone", gone, 3), ("late", late, 1)):
            async with backend:
                for _ in range(count):  # the last one is known
                    box = await FakeBackend.start(backend, SandboxSpec(detached=True, ledger=book.id))
            book.pages[node] = SandboxView(node, box.id, node, "", SPEC, lent)
        async with here, gone, late, anyio.create_task_group() as tasks:
            pool = Pool([Node("here", here), Node("gone", gone)], ledger=book)

            async def change() -> None:
                await anyio.sleep(1)
                pool.remove_node("gone", cause("it is lost"))
                pool.add_node(Node("late", late))

            tasks.start_soon(change)
            async with pool:
                assert [pool.view(node).state for node in ("here", "gone", "late")] == [LEASED, LOST, LOST]
                await anyio.sleep(1)
                assert [box.is_gone for box in here.boxes] == [True, True, False]
                assert [box.is_gone for box in late.boxes] == [True]

    run(main)


def test_what_was_being_started_or_held_by_a_block_is_stopped() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        async with backend:
            box = await backend.start(SandboxSpec(detached=True))
        lent = (Phase(STARTING, 1.0, ""), Phase(LEASED, 2.0, ""), Phase(SUSPECT, 3.0, ""))
        book.pages["pool-8"] = SandboxView("pool-8", box.id, "here", "", SPEC, lent)
        book.pages["b"] = SandboxView("b", "", "here", "", SPEC, lent[:1])
        async with opened(backend, book) as pool:
            await anyio.sleep(1)
            assert states(pool.view("b")) == [STARTING, STOPPED]
            assert pool.view("pool-8").phases[-1].reason == "its holder is gone"
            assert box.is_gone
            async with pool.lease(SPEC) as fresh:
                assert fresh.id == "pool-9"

    run(main)


def test_a_spare_that_was_being_lent_is_taken_back_once_and_by_its_new_name() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        async with backend:
            box = await backend.start(SandboxSpec(detached=True))
        spare = (Phase(STARTING, 1.0, ""), Phase(READY, 2.0, ""))
        book.pages["pool-1"] = SandboxView("pool-1", box.id, "here", "", SPEC, spare)
        book.pages["a"] = SandboxView("a", box.id, "here", "", SPEC, (*spare, Phase(LEASED, 3.0, "")))
        async with opened(backend, book, stocks=[WarmSpec(SPEC, 1)]) as pool:
            assert pool.view("a").state is LEASED
            assert pool.view("pool-1").state is LOST
            assert pool.get("a").id == "a"

    run(main)


def test_a_spare_is_written_down_under_its_new_name_before_its_old_one_is_over() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        async with opened(backend, book, stocks=[WarmSpec(SPEC, 1)]) as pool:
            await anyio.sleep(1)
            await pool.create("a", SPEC)
            await anyio.sleep(1)
        assert book.order.index(("a", LEASED)) + 1 == book.order.index(("pool-1", STOPPED))

    run(main)


def test_leaving_the_pool_stops_all_and_writes_that_down() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        async with opened(backend, book, stocks=[WarmSpec(SPEC, 1)]) as pool:
            await pool.create("a", SandboxSpec(memory_mib=9))
        assert all(box.is_gone for box in backend.boxes)
        assert {view.state for view in book.pages.values()} == {STOPPED}
        assert all(box.spec.detached for box in backend.boxes)

    run(main)


def test_a_sandbox_that_may_reach_hosts_ends_with_the_server_whose_proxy_it_uses() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        async with opened(backend, book, is_killed=True) as pool:
            await pool.create("a", SandboxSpec(network=("example.org",)))
            await pool.create("b", SandboxSpec(network="open"))
            assert [(box.spec.detached, box.spec.ledger) for box in backend.boxes] == [(False, ""), (True, "book")]
        backend.boxes[0].die(cause("its server is gone"))
        async with opened(backend, book) as pool:
            assert pool.view("a").phases[-1].reason == "gone while the server was down"
            assert states(pool.view("b")) == [STARTING, LEASED, LEASED]

    run(main)


def test_a_pool_that_is_cancelled_writes_the_end_down_too() -> None:
    async def main() -> None:
        backend, book = lasting(), Book(save_s=0.5)
        with anyio.move_on_after(5):
            async with opened(backend, book) as pool:
                await pool.create("a", SPEC)
                await pool.create("b", SPEC)
                await anyio.sleep_forever()
        assert {view.state for view in book.pages.values()} == {STOPPED}

    run(main)


def test_what_cannot_be_written_down_is_not_lent() -> None:
    async def main() -> None:
        backend, book = lasting(), Book()
        book.is_full = True
        async with opened(backend, book) as pool:
            with pytest.raises(LeaseNotPersistedError, match="cannot persist leases"):
                await pool.create("a", SPEC)
            events = [event for event in await told(pool) if event.kind == "ledger"]
            assert events[0].text == "sandbox not persisted: no space left on device"
            await anyio.sleep(1)
            assert backend.boxes[0].is_gone
            book.is_full = False
            await pool.create("a", SPEC)
            assert pool.view("a").state is LEASED

    run(main)


def test_of_one_sandbox_only_the_newest_view_that_waits_is_written() -> None:
    async def main() -> None:
        book = Book(save_s=1)
        saver = LedgerWriter(book, lambda view, why: None)
        phases: tuple[Phase, ...] = (Phase(STARTING, 1.0, ""),)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(saver.run)
            await anyio.sleep(0.1)
            saver.put(SandboxView("a", "", "", "", SPEC, phases))
            await anyio.sleep(0.1)
            for _ in range(5):
                phases = (*phases, Phase(READY, 2.0, ""))
                saver.put(SandboxView("b", "", "", "", SPEC, phases))
                saver.put(SandboxView("a", "", "", "", SPEC, phases))
            assert await saver.saved("a")
            assert clock.now() == pytest.approx(3.1)
            tasks.cancel_scope.cancel()
        assert book.order == [("a", STARTING), ("b", READY), ("a", READY)]
        assert len(book.pages["a"].phases) == 6

    run(main)
