"""Sandboxes for environments, from a pool whose nodes change."""

from __future__ import annotations

import anyio
import pytest

from envkit import clock
from envkit.errors import CapacityError
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.types import SandboxSpec
from envkit.wiring.gateway.env_workers import EnvSandboxStarter
from tests.sandbox.fake.backend import FakeBackend


def test_without_capacity_a_first_start_fails_and_later_ones_wait_for_nodes() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, Pool() as pool, anyio.create_task_group() as tasks:
            starter = EnvSandboxStarter(pool, SandboxSpec(), "shared", 1)
            with pytest.raises(CapacityError):
                await starter.start()

            async def join() -> None:
                await anyio.sleep(300)
                pool.add_node(Node("one", backend))

            tasks.start_soon(join)
            await starter.start()
            assert 300 <= clock.now() <= 302

    clock.run(main, virtual=True)
