"""The sandboxes of a node: what ends them without an order of the gateway."""

from __future__ import annotations

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxLostError
from envkit.fleet.node_pool import NodePool
from envkit.types import CauseKind, SandboxSpec
from tests.sandbox.fake.backend import FakeBackend, Fate


def test_a_sandbox_outlives_its_gateway_by_its_time_to_live() -> None:
    async def main() -> None:
        async with FakeBackend() as backend, NodePool(backend) as pool:
            await pool.create("a", SandboxSpec(), ttl_s=30)
            await anyio.sleep(20)
            pool.get("a")  # a gateway that is connected uses it
            await anyio.sleep(25)
            pool.get("a")
            await anyio.sleep(32)
            with pytest.raises(SandboxLostError) as found:
                pool.get("a")
            assert found.value.cause.kind is CauseKind.ORPHANED

    clock.run(main, virtual=True)


def test_the_cause_of_an_end_is_kept_for_the_gateway() -> None:
    async def main() -> None:
        async with FakeBackend(lambda number, rng: Fate(dies_after_s=5.0)) as backend, NodePool(backend) as pool:
            await pool.create("a", SandboxSpec())
            await anyio.sleep(10)
            with pytest.raises(SandboxLostError) as found:
                pool.get("a")
            assert found.value.cause.kind is CauseKind.KILLED

    clock.run(main, virtual=True)
