"""Sandboxes that are prepared once."""

from __future__ import annotations

import anyio
import pytest

from envkit import clock
from envkit.environments.tools import prepared
from envkit.environments.tools.prepared import lease_prepared
from envkit.protocols import Sandbox
from envkit.types import SandboxSpec
from tests.environments.tools.pools import pool_of
from tests.sandbox.fake.backend import Fate

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
