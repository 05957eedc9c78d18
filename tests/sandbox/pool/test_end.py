"""A pool of scripted sandboxes leaves nothing when a call or the pool is cancelled or closed, on virtual time."""

from __future__ import annotations

import anyio
import pytest

from envkit import clock
from envkit.errors import CapacityError, SandboxError, SandboxLostError
from envkit.protocols import Sandbox
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.warm_stock import WarmSpec
from envkit.types import ExecResult, SandboxSpec, SandboxState
from tests.sandbox.fake.backend import FakeBackend, Fate
from tests.sandbox.pool.pools import SPEC, opened, run


@pytest.mark.parametrize("turns", range(12))
def test_a_create_that_is_cancelled_at_any_moment_can_be_repeated(turns: int) -> None:
    async def main() -> None:
        async with opened(Fate(start_s=1), sandboxes=1) as (pool, backend):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(pool.create, "a", SPEC)
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    if turns > 8:
                        await anyio.sleep(1)
                    scope.cancel()
            await anyio.sleep(0.5)
            assert (await pool.create("a", SPEC)).state is SandboxState.LEASED
            assert sum(not sandbox.is_gone for sandbox in backend.sandboxes) == 1
            await pool.stop("a")
            assert all(sandbox.is_gone for sandbox in backend.sandboxes)

    run(main)


@pytest.mark.parametrize("turns", range(12))
def test_a_lease_that_is_cancelled_at_any_moment_leaves_nothing_behind(turns: int) -> None:
    async def main() -> None:
        async with opened(Fate(start_s=1), sandboxes=1) as (pool, backend):

            async def play() -> None:
                async with pool.lease(SPEC, tenant="ann") as sandbox:
                    await sandbox.exec(["true"], timeout_s=1)
                    await anyio.sleep_forever()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(play)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                if turns > 6:
                    await anyio.sleep(1)
                tasks.cancel_scope.cancel()
            await anyio.sleep(0.5)
            assert all(sandbox.is_gone for sandbox in backend.sandboxes)
            assert (pool.counts().states, pool.counts().waiting) == ({}, {})
            async with pool.lease(SPEC, wait_s=0):
                pass

    run(main)


def test_leaving_the_pool_stops_all_sandboxes_and_ends_all_calls() -> None:
    async def main() -> None:
        ends: list[str] = []

        async def play(pool: Pool, sandbox: Sandbox) -> None:
            try:
                await sandbox.exec(["sleep", "50"], timeout_s=100)
            except SandboxLostError as error:
                ends.append(str(error))

        def answer(command: object) -> ExecResult:
            return ExecResult(0, duration_s=50)

        async with anyio.create_task_group() as tasks:
            async with opened(Fate(answer=answer), stocks=[WarmSpec(SandboxSpec(memory_mib=7), 3)]) as (pool, backend):
                await pool.create("a", SPEC)
                tasks.start_soon(play, pool, pool.get("a"))
                await anyio.sleep(5)
            assert all(sandbox.is_gone for sandbox in backend.sandboxes)
            assert len(backend.sandboxes) == 4
        assert ends == ["sandbox a lost: the pool was closed"]
        assert clock.now() == 5
        with pytest.raises(SandboxError, match="the pool is not open"):
            await pool.create("b", SPEC)

    run(main)


def test_a_waiting_lease_raises_when_the_pool_is_closed() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks, opened(sandboxes=1) as (pool, _):
            await pool.create("a", SPEC)

            async def wait() -> None:
                with pytest.raises(CapacityError, match="the pool was closed"):
                    async with pool.lease(SPEC):
                        pytest.fail("there is no capacity")

            tasks.start_soon(wait)
            await anyio.sleep(1)

    run(main)


def test_a_cancelled_pool_stops_all_sandboxes_also_starting_ones() -> None:
    async def main() -> None:
        with anyio.move_on_after(3):
            async with opened(Fate(), Fate(start_s=9), stocks=[WarmSpec(SPEC, 2)]) as (_, backend):
                await anyio.sleep_forever()
        assert clock.now() == 3
        assert all(sandbox.is_gone for sandbox in backend.sandboxes)

    run(main)


def test_an_error_in_the_block_is_raised_unchanged() -> None:
    async def main() -> None:
        async def fail() -> None:
            async with opened() as (pool, backend):
                backends.append(backend)
                await pool.create("a", SPEC)
                raise ZeroDivisionError

        backends: list[FakeBackend] = []
        with pytest.raises(ZeroDivisionError):
            await fail()
        assert backends[0].sandboxes[0].is_gone

    run(main)
