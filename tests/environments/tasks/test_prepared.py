"""Sandboxes that are prepared once."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import pytest

from envkit import clock
from envkit.environments.tasks import prepared
from envkit.environments.tasks.prepared import lease_prepared, remove_prepared
from envkit.protocols import Sandbox
from envkit.sandbox import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.types import SandboxSpec
from tests.environments.tools.pools import pool_of
from tests.sandbox.fake.backend import FakeBackend, Fate

PATH = "/workspace/a"


def test_the_first_lease_prepares_and_the_others_start_from_its_snapshot_even_at_once() -> None:
    prepared_keys: list[str] = []

    async def main() -> None:
        async with pool_of(Fate()) as (pool, _):

            async def one(key: str) -> None:
                async def prepare(sandbox: Sandbox) -> None:
                    prepared_keys.append(key)
                    await sandbox.write(PATH, key.encode())

                async with lease_prepared(pool, SandboxSpec(), key, prepare) as sandbox:
                    assert await sandbox.read(PATH) == key.encode()

            async with anyio.create_task_group() as tasks:
                for key in "aabab":
                    tasks.start_soon(one, key)

    clock.run(main)
    assert sorted(prepared_keys) == ["a", "b"]


def test_an_old_snapshot_is_removed_and_its_sandboxes_are_prepared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MAX_SNAPSHOTS", 2)
    prepared_keys: list[str] = []

    async def main() -> None:
        async with pool_of(Fate()) as (pool, backend):
            for key in "abaca":  # c evicts b

                async def prepare(sandbox: Sandbox, key: str = key) -> None:
                    prepared_keys.append(key)
                    await sandbox.write(PATH, key.encode())

                async with lease_prepared(pool, SandboxSpec(), key, prepare) as sandbox:
                    assert await sandbox.read(PATH) == key.encode()
            names = [f"snapshot-{number}" for number in range(4)]
            assert [await backend.snapshot_bytes(name) > 0 for name in names].count(True) == 2
            for name in names:  # by somebody else
                await backend.remove_snapshot(name)
            async with lease_prepared(pool, SandboxSpec(), "a", prepare):
                pass

    clock.run(main)
    assert prepared_keys == ["a", "b", "c", "a"]


def test_if_the_node_of_the_snapshot_is_full_another_node_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "SNAPSHOT_WAIT_S", 0.01)
    monkeypatch.setattr(prepared, "LEASE_S", 5.0)
    spec = SandboxSpec(memory_mib=64)
    prepared_on: list[str] = []

    async def prepare(sandbox: Sandbox) -> None:
        prepared_on.append(sandbox.id)

    async def main() -> None:
        async with FakeBackend() as first, FakeBackend() as second:
            nodes = [Node(name, one, Capacity(memory_mib=2 * 64)) for name, one in (("a", first), ("b", second))]
            async with Pool(nodes) as pool, AsyncExitStack() as leases:
                for _ in range(4):
                    await leases.enter_async_context(lease_prepared(pool, spec, "key", prepare))
                assert (len(first.sandboxes), len(second.sandboxes)) == (2, 2)

    clock.run(main)
    assert 2 <= len(prepared_on) <= 3


def test_the_snapshots_of_a_pool_can_be_removed() -> None:
    async def prepare(sandbox: Sandbox) -> None:
        await sandbox.write(PATH, b"x")

    async def main() -> None:
        async with pool_of(Fate()) as (pool, backend):
            for key in "ab":
                async with lease_prepared(pool, SandboxSpec(), key, prepare):
                    pass
            names = [f"snapshot-{number}" for number in range(3)]
            assert [await backend.snapshot_bytes(name) > 0 for name in names].count(True) == 2
            await remove_prepared(pool)
            assert not any([await backend.snapshot_bytes(name) for name in names])

    clock.run(main)
