"""The quota of snapshots."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxNotFoundError, SnapshotLimitError
from envkit.http.sandboxes.snapshot_quota import SnapshotBounds, Snapshots
from envkit.protocols import Sandbox
from envkit.sandbox.pool import Pool
from envkit.types import SandboxSpec
from tests.http.pools import pool_of
from tests.keys import key
from tests.sandbox.fake.backend import FakeBackend

WHAT_TO_DO = "; remove one first: envkit sandbox snapshot rm --url URL NAME, or DELETE /v1/snapshots/NAME"


def run(bounds: SnapshotBounds, work: Callable[[Snapshots, Sandbox, Pool], Awaitable[None]]) -> None:
    async def main() -> None:
        async with FakeBackend() as backend, pool_of(backend) as pool:
            await pool.create("a", SandboxSpec())
            await work(Snapshots(pool, bounds), pool.get("a"), pool)

    clock.run(main, virtual=True)


def test_a_snapshot_above_the_limit_is_rejected_until_one_is_removed() -> None:
    async def work(snapshots: Snapshots, sandbox: Sandbox, pool: Pool) -> None:
        names = [await snapshots.keep(key("a", "ann"), sandbox.snapshot) for _ in range(2)]
        with pytest.raises(SnapshotLimitError) as caught:
            await snapshots.keep(key("a", "ann"), sandbox.snapshot)
        assert str(caught.value) == "tenant 'ann' is at its limit of 2 snapshots" + WHAT_TO_DO
        await snapshots.keep(key("a", "bob"), sandbox.snapshot)
        with pytest.raises(SnapshotLimitError, match="this server is at its limit of 3 snapshots"):
            await snapshots.keep(key("a", "cid"), sandbox.snapshot)
        assert [one.name for one in snapshots.all("ann")] == names
        await snapshots.remove(names[0], "bob")  # not its owner
        assert [one.name for one in snapshots.all("ann")] == names
        await snapshots.remove(names[0], "ann")
        with pytest.raises(SandboxNotFoundError):
            snapshots.pool_id(names[0], None)
        await snapshots.keep(key("a", "ann"), sandbox.snapshot)

    run(SnapshotBounds(per_tenant=2, total=3), work)


def test_snapshots_in_progress_count_and_failed_ones_do_not() -> None:
    async def work(snapshots: Snapshots, sandbox: Sandbox, pool: Pool) -> None:
        go = anyio.Event()

        async def slow() -> str:
            await go.wait()
            raise OSError("the disk is full")

        async def failing() -> None:
            with pytest.raises(OSError, match="the disk is full"):
                await snapshots.keep(key("a", "ann"), slow)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(failing)
            await anyio.sleep(1)
            with pytest.raises(SnapshotLimitError, match="at its limit of 1"):
                await snapshots.keep(key("a", "ann"), sandbox.snapshot)
            go.set()
        await snapshots.keep(key("a", "ann"), sandbox.snapshot)

    run(SnapshotBounds(per_tenant=1), work)


def test_a_snapshot_above_the_size_limit_is_rejected_and_removed() -> None:
    async def work(snapshots: Snapshots, sandbox: Sandbox, pool: Pool) -> None:
        taken: list[str] = []

        async def take() -> str:
            taken.append(await sandbox.snapshot())
            return taken[-1]

        await sandbox.write("/workspace/f", bytes(600 << 10))
        await snapshots.keep(key("a", "ann"), take)
        with pytest.raises(SnapshotLimitError) as caught:
            await snapshots.keep(key("a", "ann"), take)
        message = "tenant 'ann': no space for 1 MiB (0 MiB used, limit 1 MiB)"
        assert str(caught.value) == message + WHAT_TO_DO
        assert [await pool.snapshot_bytes(name) for name in taken] == [600 << 10, 0]
        for tenant in ("bob", "cid"):
            await snapshots.keep(key("a", tenant), take)
        with pytest.raises(SnapshotLimitError, match=r"^this server: no space for 1 MiB \(1 MiB used, limit 2 MiB\)"):
            await snapshots.keep(key("a", "dan"), take)

    run(SnapshotBounds(per_tenant_mib=1, total_mib=2), work)
