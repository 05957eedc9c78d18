"""What a pool does with a spec that cannot be granted, by one node or by none, or that lets nothing start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from envkit import clock
from envkit.errors import SandboxEndedError, SandboxRefusedError, SandboxStartError
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.types import CauseKind, SandboxSpec, SandboxState
from tests.causes import cause
from tests.sandbox.fake.backend import FakeBackend, FakeSandbox, Fate
from tests.sandbox.pool.pools import SPEC, opened, run


class Choosy(FakeBackend):
    """Has one image, and says so of every other."""

    def __init__(self, image: str) -> None:
        super().__init__()
        self.image = image
        self.tries = 0

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        self.tries += 1
        if spec.image not in (None, self.image):
            raise SandboxRefusedError("x", f"there is no image {spec.image!r} here")
        return await super().start(spec)


class TellsMemoryLimit(FakeBackend):
    """Tells a sandbox's own memory limit from the memory of its host."""

    distinguishes_memory_limit = True


class Broken(Choosy):
    """Starts nothing."""

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        await super().start(spec)
        raise SandboxStartError("x", "its daemon does not answer")


@asynccontextmanager
async def choosy(*images: str, boxes: int = 9) -> AsyncIterator[tuple[Pool, list[Choosy]]]:
    async with AsyncExitStack() as stack:
        backends = [await stack.enter_async_context(Choosy(image)) for image in images]
        nodes = [Node(backend.image, backend, Capacity(sandboxes=boxes)) for backend in backends]
        yield await stack.enter_async_context(Pool(nodes)), backends


def test_what_no_node_can_grant_is_refused_and_no_node_is_given_a_rest() -> None:
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


def test_what_one_node_refuses_is_started_on_the_one_that_grants_it() -> None:
    async def main() -> None:
        async with choosy("a", "b", "c") as (pool, _):
            assert (await pool.create("box", SandboxSpec(image="c"))).node == "c"

    run(main)


def test_what_no_backend_could_grant_is_tried_once() -> None:
    async def main() -> None:
        async with choosy("a", "b") as (pool, backends):
            with pytest.raises(SandboxRefusedError, match="cpus=-1 is refused") as caught:
                await pool.create("box", SandboxSpec(cpus=-1))
            assert caught.value.everywhere
            assert sorted(backend.tries for backend in backends) == [0, 1]

    run(main)


def test_what_a_full_node_may_grant_is_not_refused_for_good() -> None:
    async def main() -> None:
        async with choosy("a", "b", boxes=2) as (pool, _):
            for number in range(2):
                await pool.create(f"{number}", SandboxSpec(image="b"))
            with pytest.raises(SandboxStartError, match="no image 'b' here; other nodes that may grant it") as caught:
                await pool.create("third", SandboxSpec(image="b"))
            assert not isinstance(caught.value, SandboxRefusedError)

    run(main)


def test_a_node_that_failed_is_to_blame_and_not_the_one_that_refused_after_it() -> None:
    async def main() -> None:
        async with Broken("dead") as dead, Choosy("a") as backend, Pool() as pool:
            for one in (dead, backend):
                pool.add_node(Node(one.image, one, Capacity(sandboxes=9)))
            with pytest.raises(SandboxStartError, match="its daemon does not answer") as caught:
                await pool.create("box", SandboxSpec(image="dead"))
            assert not isinstance(caught.value, SandboxRefusedError)

    run(main)


def test_a_refusal_ends_no_rest_of_a_node_on_which_nothing_starts() -> None:
    async def main() -> None:
        async with Broken("a") as backend:
            node = Node("a", backend, Capacity(sandboxes=9))
            async with Pool([node]) as pool:
                with pytest.raises(SandboxStartError):
                    await pool.create("box", SPEC)
                until = node.resumes_at
                assert until > 0
                with pytest.raises(SandboxRefusedError):
                    await pool.create("wild", SandboxSpec(image="z"))
                assert node.resumes_at == until

    run(main)


def test_a_bound_that_the_only_node_does_not_hold_is_refused() -> None:
    async def main() -> None:
        async with FakeBackend(capabilities={"memory": False}) as backend, Pool([Node("here", backend)]) as pool:
            with pytest.raises(SandboxRefusedError, match="memory_mib=64 is refused: this backend cannot limit memory"):
                await pool.create("box", SandboxSpec(memory_mib=64))

    run(main)


def test_a_snapshot_that_is_gone_is_refused() -> None:
    async def main() -> None:
        async with opened() as (pool, _):
            for snapshot in ("here/gone", "nowhere/gone"):
                with pytest.raises(SandboxRefusedError, match="there is no snapshot"):
                    await pool.create("box", SPEC, snapshot=snapshot)

    run(main)


class Wild(FakeBackend):
    """Its boxes come up, but one with a command ends before it is ready."""

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
def test_what_ends_by_what_was_asked_for_is_tried_once_and_no_node_is_given_a_rest(
    spec: SandboxSpec, cause: str
) -> None:
    async def main() -> None:
        async with Wild(after_2_s) as first, Wild(after_2_s) as second:
            nodes = [Node("a", first, Capacity(sandboxes=9)), Node("b", second, Capacity(sandboxes=9))]
            async with Pool(nodes) as pool:
                for number in range(20):
                    with pytest.raises(SandboxEndedError, match=f"wild{number} did not start: {cause}"):
                        await pool.create(f"wild{number}", spec)
                assert first.tries + second.tries == 20
                assert [node.resumes_at for node in nodes] == [0, 0]
                for number in range(2):
                    await pool.create(f"{number}", SPEC)
                assert {view.node for view in pool.views() if view.state is SandboxState.LEASED} == {"a", "b"}

    run(main)


@pytest.mark.parametrize(("start_timeout_s", "cause"), [(30.0, "not ready after"), (0.3, "no such disk")])
def test_a_node_is_to_blame_for_what_takes_longer_than_it_may_and_for_what_fails_before_its_time(
    start_timeout_s: float, cause: str
) -> None:
    async def main() -> None:
        fate = Fate(start_s=99.0) if start_timeout_s == 30 else Fate(start_failure="no such disk")
        async with FakeBackend(lambda number, rng: fate) as backend:
            node = Node("a", backend)
            async with Pool([node]) as pool:
                with pytest.raises(SandboxStartError, match=cause) as caught:
                    await pool.create("box", SandboxSpec(start_timeout_s=start_timeout_s))
                assert not isinstance(caught.value, SandboxEndedError)
                assert node.resumes_at > clock.now()

    run(main)


def test_a_node_is_not_to_blame_for_a_bound_on_memory_in_which_nothing_starts() -> None:
    async def main() -> None:
        async with FakeBackend(
            lambda number, rng: Fate(start_failure=cause("out of memory", CauseKind.OUT_OF_MEMORY))
        ) as backend:
            node = Node("a", backend)
            async with Pool([node]) as pool:
                with pytest.raises(SandboxEndedError, match="out of memory"):
                    await pool.create("box", SandboxSpec(memory_mib=1))
                assert node.resumes_at == 0

    run(main)


@pytest.mark.parametrize("by_agent", [False, True])
def test_a_node_that_can_tell_is_to_blame_for_a_start_that_its_own_memory_was_too_small_for(by_agent: bool) -> None:
    fate = Fate(start_failure=cause("out of memory", CauseKind.OUT_OF_MEMORY, by_agent=by_agent))

    async def main() -> None:
        async with TellsMemoryLimit(lambda number, rng: fate) as backend:
            node = Node("a", backend)
            async with Pool([node]) as pool:
                with pytest.raises(SandboxStartError) as caught:
                    await pool.create("box", SandboxSpec(memory_mib=1))
                is_to_blame = not isinstance(caught.value, SandboxEndedError)
                assert (is_to_blame, node.resumes_at > clock.now()) == (not by_agent, not by_agent)

    run(main)


def test_only_what_the_fleet_failed_at_counts_as_failed_starts() -> None:
    async def main() -> None:
        async with Wild() as wild, Pool([Node("a", wild)]) as pool:
            for spec in (SandboxSpec(("false",)), SandboxSpec(cpus=-1)):
                with pytest.raises(SandboxStartError):
                    await pool.create("box", spec)
            assert (pool.counts().starts, pool.counts().failed_starts) == (2, 0)
        async with Broken("a") as dead, Pool([Node("a", dead)]) as pool:
            with pytest.raises(SandboxStartError):
                await pool.create("box", SPEC)
            assert (pool.counts().starts, pool.counts().failed_starts) == (1, 1)

    run(main)


@pytest.mark.bwrap
@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        (SandboxSpec(("no-such-program",)), "exited with code 127: no-such-program: No such file"),
        (SandboxSpec(start_timeout_s=0.001), r"not ready after 0\.001 s"),
    ],
)
def test_no_real_node_is_given_a_rest_for_what_its_tenants_ask_for(spec: SandboxSpec, cause: str) -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            node = Node("here", backend)
            async with Pool([node]) as pool:
                for number in range(3):
                    with pytest.raises(SandboxEndedError, match=f"wild{number} did not start: .*{cause}"):
                        await pool.create(f"wild{number}", spec)
                assert node.resumes_at == 0
                await pool.create("well", SPEC)
                assert pool.counts().failed_starts == 0

    clock.run(main)
