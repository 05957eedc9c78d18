"""The nodes of a pool of scripted sandboxes, on virtual time: placement, failures, adding and removing."""

from __future__ import annotations

import anyio
import pytest

from envkit import clock
from envkit.errors import CapacityError, ImpossibleSandboxError, SandboxLostError, SandboxStartError
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.types import SandboxSpec, SandboxState
from tests.causes import cause
from tests.sandbox.fake.backend import FakeBackend, FakeSandbox, Fate
from tests.sandbox.pool.pools import SPEC, borrow, run


def test_the_least_loaded_node_gets_the_next_sandbox() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            nodes = [
                Node("small", backend, Capacity(memory_mib=2048)),
                Node("large", backend, Capacity(memory_mib=8192)),
            ]
            async with Pool(nodes) as pool:
                for number in range(10):
                    await pool.create(f"sandbox {number}", SPEC)
                placed = [pool.view(f"sandbox {number}").node for number in range(10)]
                assert placed == [*["large"] * 3, "small", *["large"] * 4, "small", "large"]
                with pytest.raises(CapacityError):
                    await pool.create("one more", SPEC)

    run(main)


def test_a_request_that_only_a_removed_node_could_hold_fails_without_delaying_others() -> None:
    async def main() -> None:
        async with FakeBackend() as backend:
            pool = Pool([Node("big", backend, Capacity(cpus=8)), Node("small", backend, Capacity(cpus=1))])
            async with pool, anyio.create_task_group() as tasks:
                await pool.create("a", SandboxSpec(cpus=7))
                snapshot = await pool.get("a").snapshot()
                tasks.start_soon(remove_later, pool, "big")
                with pytest.raises(ImpossibleSandboxError, match="cpus=8 exceeds every node"):
                    await borrow(pool, SandboxSpec(cpus=8))
                assert clock.now() == 5
                with pytest.raises(SandboxStartError, match="there is no snapshot 'big/snapshot-0'"):
                    await pool.create("b", SandboxSpec(cpus=1), snapshot=snapshot)
                assert pool.counts().waiting == {}

    run(main)


class Dead(FakeBackend):
    """Starts nothing: fails quickly or never returns."""

    is_hung = False
    tries = 0

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        self.tries += 1
        if self.is_hung:
            await anyio.sleep_forever()
        raise SandboxStartError("dead", "its daemon does not answer")


def test_a_node_on_which_nothing_starts_backs_off_and_its_requests_start_elsewhere() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Dead() as dead:
            pool = Pool([Node("dead", dead, Capacity(sandboxes=50)), Node("well", backend, Capacity(sandboxes=50))])
            async with pool:
                for number in range(50):
                    await pool.create(f"{number}", SPEC)
                    await anyio.sleep(1)
                assert pool.counts().failed_starts == 0
                assert {view.node for view in pool.views()} == {"well"}
                # Starts at 0, 1, 2, 3, 4, 6, 10, 17, 27, 37 and 47 s: after 0.1 s, twice that, ... and at most 10 s.
                assert dead.tries == 11
                with pytest.raises(CapacityError):
                    await pool.create("full", SPEC)
                await anyio.sleep(10)
                with pytest.raises(SandboxStartError, match="its daemon does not answer"):
                    await pool.create("full", SPEC)

    run(main)


def test_a_node_is_tried_with_one_sandbox_after_its_backoff_and_used_again_if_it_starts() -> None:
    class Mended(Dead):
        async def start(self, spec: SandboxSpec) -> FakeSandbox:
            if clock.now() < 5:
                return await super().start(spec)
            self.tries += 1
            await anyio.sleep(2)
            return await FakeBackend.start(self, spec)

    async def main() -> None:
        async with FakeBackend() as backend, Mended() as mended:
            pool = Pool([Node("mended", mended, Capacity(sandboxes=9)), Node("well", backend, Capacity(sandboxes=1))])
            async with pool, anyio.create_task_group() as tasks, pool.lease(SPEC):
                await anyio.sleep(10)
                assert mended.tries == 1
                for _ in range(5):
                    tasks.start_soon(borrow, pool, SPEC)
                await anyio.sleep(1)
                assert mended.tries == 2
                await anyio.sleep(1.5)
                assert mended.tries == 6

    run(main)


def test_a_start_that_never_returns_times_out() -> None:
    async def main() -> None:
        async with Dead() as dead, Pool([Node("here", dead, Capacity(sandboxes=1))]) as pool:
            dead.is_hung = True
            with pytest.raises(SandboxStartError, match="node here did not start the sandbox within 70 s"):
                async with pool.lease(SandboxSpec(start_timeout_s=10), wait_s=5):
                    pytest.fail("it did not start")
            assert clock.now() == 70
            assert pool.views()[0].state is SandboxState.STOPPED

    run(main)


def test_the_sandboxes_of_a_removed_node_are_lost_with_its_cause() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool() as pool:
            with pytest.raises(CapacityError, match="the pool has no nodes"):
                await pool.create("a", SPEC)
            pool.add_node(Node("one", backend, Capacity(sandboxes=1)))
            with pytest.raises(ValueError, match="a node named 'one' already exists"):
                pool.add_node(Node("one", backend))
            await pool.create("a", SPEC)
            sandbox = pool.get("a")
            pool.add_node(Node("two", backend, Capacity(sandboxes=1)))
            await pool.create("b", SPEC)
            pool.remove_node("one", cause("node one was shut down"))
            pool.remove_node("one", cause("again"))
            with pytest.raises(SandboxLostError, match="a lost: node one was shut down"):
                await sandbox.exec(["true"], timeout_s=1)
            await anyio.sleep(1)
            assert [pool.view(name).state for name in ("a", "b")] == [SandboxState.LOST, SandboxState.LEASED]
            assert backend.sandboxes[0].is_gone
            with pytest.raises(CapacityError):
                await pool.create("c", SPEC)
            pool.remove_node("two", cause("node two is on fire"))
            with pytest.raises(CapacityError, match="the pool has no nodes; the last one left: node two is on fire"):
                await pool.create("c", SPEC)

    run(main)


def test_a_start_on_a_removed_node_fails() -> None:
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
    pool.remove_node(name, cause("gone"))


def test_a_lease_waits_for_a_new_node() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool() as pool, anyio.create_task_group() as tasks:

            async def add() -> None:
                await anyio.sleep(5)
                assert pool.wanted() == 1
                pool.add_node(Node("one", backend, Capacity(sandboxes=3)))

            tasks.start_soon(add)
            async with pool.lease(SPEC):
                assert clock.now() == 5
                assert pool.wanted() == -2

    run(main)


class WithImages(FakeBackend):
    """A machine that says which images it has."""

    images: tuple[str, ...] = ()

    def lacks(self, spec: SandboxSpec) -> int:
        return spec.image not in self.images


def test_a_node_with_the_image_is_preferred_until_it_is_full_and_a_draining_one_gets_nothing() -> None:
    async def main() -> None:
        async with WithImages() as near, WithImages() as far:
            near.images = ("swe:1",)
            nodes = [Node("far", far, Capacity(sandboxes=9)), Node("near", near, Capacity(sandboxes=2))]
            async with Pool(nodes) as pool:
                for number in range(3):
                    await pool.create(f"sandbox {number}", SandboxSpec(image="swe:1"))
                assert [pool.view(f"sandbox {number}").node for number in range(3)] == ["near", "near", "far"]
                await pool.stop("sandbox 0")
                assert pool.drain_node("near", drains=True)
                await pool.create("later", SandboxSpec(image="swe:1"))
                assert pool.view("later").node == "far"
                assert not pool.drain_node("far", drains=True)
                with pytest.raises(CapacityError):
                    await pool.create("last", SandboxSpec())
                pool.drain_node("near", drains=False)
                await pool.create("last", SandboxSpec())
                assert pool.view("last").node == "near"

    run(main)
