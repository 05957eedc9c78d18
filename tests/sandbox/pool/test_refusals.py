"""Specs that some or all nodes reject, or with which no sandbox starts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from envkit import clock
from envkit.errors import SandboxEndedError, SandboxRefusedError, SandboxStartError
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.types import CauseKind, SandboxSpec, SandboxState
from tests.causes import cause
from tests.sandbox.fake.backend import FakeBackend, FakeSandbox, Fate
from tests.sandbox.pool.pools import SPEC, opened, run


class Choosy(FakeBackend):
    """Has one image and rejects all others."""

    def __init__(self, image: str) -> None:
        super().__init__()
        self.image = image
        self.tries = 0

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        self.tries += 1
        if spec.image not in (None, self.image):
            raise SandboxRefusedError("x", f"there is no image {spec.image!r} here")
        return await super().start(spec)


class DistinguishesMemoryLimit(FakeBackend):
    """Distinguishes a sandbox's own memory limit from the memory of its host."""

    distinguishes_memory_limit = True


class Broken(Choosy):
    """Starts nothing."""

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        await super().start(spec)
        raise SandboxStartError("x", "its daemon does not answer")


@asynccontextmanager
async def choosy(*images: str, sandboxes: int = 9) -> AsyncIterator[tuple[Pool, list[Choosy]]]:
    async with AsyncExitStack() as stack:
        backends = [await stack.enter_async_context(Choosy(image)) for image in images]
        nodes = [Node(backend.image, backend, Capacity(sandboxes=sandboxes)) for backend in backends]
        yield await stack.enter_async_context(Pool(nodes)), backends


def test_a_spec_that_all_nodes_reject_is_rejected_without_a_backoff() -> None:
    async def main() -> None:
        async with choosy("a", "b", "c") as (pool, backends):
            for number in range(20):
                with pytest.raises(
                    SandboxRefusedError, match=f"wild{number} did not start: there is no image 'z' here"
                ):
                    await pool.create(f"wild{number}", SandboxSpec(image="z"))
            assert [backend.tries for backend in backends] == [20, 20, 20]
            for number in range(3):
                await pool.create(f"{number}", SPEC)
            assert {view.node for view in pool.views() if view.state is SandboxState.LEASED} == {"a", "b", "c"}
            assert clock.now() == 0

    run(main)


def test_a_spec_that_a_full_node_may_accept_is_not_rejected_for_good() -> None:
    async def main() -> None:
        async with choosy("a", "b", sandboxes=2) as (pool, _):
            for number in range(2):
                await pool.create(f"{number}", SandboxSpec(image="b"))
            with pytest.raises(SandboxStartError, match="no image 'b' here; other nodes were not tried") as caught:
                await pool.create("third", SandboxSpec(image="b"))
            assert not isinstance(caught.value, SandboxRefusedError)

    run(main)


def test_the_error_names_the_node_that_failed_rather_than_a_rejection() -> None:
    async def main() -> None:
        async with Broken("dead") as dead, Choosy("a") as backend, Pool() as pool:
            for one in (dead, backend):
                pool.add_node(Node(one.image, one, Capacity(sandboxes=9)))
            with pytest.raises(SandboxStartError, match="its daemon does not answer") as caught:
                await pool.create("sandbox", SandboxSpec(image="dead"))
            assert not isinstance(caught.value, SandboxRefusedError)

    run(main)


def test_a_rejection_does_not_end_the_backoff_of_a_node() -> None:
    async def main() -> None:
        async with Broken("a") as backend:
            node = Node("a", backend, Capacity(sandboxes=9))
            async with Pool([node]) as pool:
                with pytest.raises(SandboxStartError):
                    await pool.create("sandbox", SPEC)
                until = node.resumes_at
                assert until > 0
                with pytest.raises(SandboxRefusedError):
                    await pool.create("wild", SandboxSpec(image="z"))
                assert node.resumes_at == until

    run(main)


def test_an_unknown_snapshot_is_rejected() -> None:
    async def main() -> None:
        async with opened() as (pool, _):
            for snapshot in ("here/gone", "nowhere/gone"):
                with pytest.raises(SandboxRefusedError, match="there is no snapshot"):
                    await pool.create("sandbox", SPEC, snapshot=snapshot)

    run(main)


class FailsWithCommand(FakeBackend):
    """Its sandboxes start, but one with a command ends before it is ready."""

    tries = 0

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        self.tries += 1
        if spec.command:
            raise SandboxEndedError("x", "exited with code 1: no")
        return await super().start(spec)


def after_2_s(number: int, rng: object) -> Fate:
    return Fate(start_s=2.0)


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        (SandboxSpec(("false",)), "exited with code 1: no"),
        (SandboxSpec(start_timeout_s=0.3), r"not ready after 0\.3 s"),
    ],
)
def test_a_start_that_fails_by_its_own_spec_is_tried_once_without_a_backoff(spec: SandboxSpec, cause: str) -> None:
    async def main() -> None:
        async with FailsWithCommand(after_2_s) as first, FailsWithCommand(after_2_s) as second:
            nodes = [Node("a", first, Capacity(sandboxes=9)), Node("b", second, Capacity(sandboxes=9))]
            async with Pool(nodes) as pool:
                for number in range(20):
                    with pytest.raises(SandboxEndedError, match=f"wild{number} did not start: {cause}"):
                        await pool.create(f"wild{number}", spec)
                assert first.tries + second.tries == 20
                assert pool.counts().failed_starts == 0
                assert [node.resumes_at for node in nodes] == [0, 0]
                for number in range(2):
                    await pool.create(f"{number}", SPEC)
                assert {view.node for view in pool.views() if view.state is SandboxState.LEASED} == {"a", "b"}

    run(main)


def test_a_memory_limit_that_is_too_small_does_not_count_against_the_node() -> None:
    async def main() -> None:
        async with FakeBackend(
            lambda number, rng: Fate(start_failure=cause("out of memory", CauseKind.OUT_OF_MEMORY))
        ) as backend:
            node = Node("a", backend)
            async with Pool([node]) as pool:
                with pytest.raises(SandboxEndedError, match="out of memory"):
                    await pool.create("sandbox", SandboxSpec(memory_mib=1))
                assert node.resumes_at == 0

    run(main)


@pytest.mark.parametrize("by_agent", [False, True])
def test_a_start_that_fails_for_lack_of_host_memory_counts_against_the_node(by_agent: bool) -> None:
    fate = Fate(start_failure=cause("out of memory", CauseKind.OUT_OF_MEMORY, by_agent=by_agent))

    async def main() -> None:
        async with DistinguishesMemoryLimit(lambda number, rng: fate) as backend:
            node = Node("a", backend)
            async with Pool([node]) as pool:
                with pytest.raises(SandboxStartError) as caught:
                    await pool.create("sandbox", SandboxSpec(memory_mib=1))
                is_node_failure = not isinstance(caught.value, SandboxEndedError)
                assert (is_node_failure, node.resumes_at > clock.now()) == (not by_agent, not by_agent)

    run(main)
