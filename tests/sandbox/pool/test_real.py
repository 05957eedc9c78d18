"""Pools of real sandboxes: warm ones, their statistics, and that nothing is left."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from envkit import clock
from envkit.protocols import Sandbox
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.lease import Lease
from envkit.sandbox.pool.node import Capacity, Node
from envkit.sandbox.pool.warm_stock import WarmSpec
from tests.contract.kinds import KINDS, Kind, run, traces, until

PARAMS = [
    pytest.param("local", marks=[pytest.mark.bwrap, pytest.mark.limits]),
    pytest.param("docker", marks=pytest.mark.docker),
]


@pytest.fixture(params=PARAMS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@asynccontextmanager
async def opened(kind: Kind, stocks: Sequence[WarmSpec] = ()) -> AsyncIterator[Pool]:
    async with kind.backend() as backend, Pool([Node("here", backend, Capacity(sandboxes=8))], stocks=stocks) as pool:
        yield pool


@pytest.mark.alone  # milliseconds are measured
def test_warm_sandboxes_are_leased_within_twenty_milliseconds_and_nothing_is_left(kind: Kind) -> None:
    before = traces()

    async def main() -> None:
        booted: list[str] = []

        async def boot(sandbox: Sandbox) -> None:
            await sandbox.write("booted", b"yes")
            booted.append(sandbox.id)

        spec = kind.spec(memory_mib=64)
        seconds: list[float] = []
        async with opened(kind, [WarmSpec(spec, 2, boot)]) as pool:
            for _ in range(10):
                await until(lambda: pool.counts().warm == 2)
                began = clock.now()
                async with pool.lease(spec) as sandbox:
                    seconds.append(clock.now() - began)
                    assert await sandbox.read("booted") == b"yes"
            assert len(booted) >= 11
        assert statistics.median(seconds) < 0.02

    run(main)
    assert traces() == before


def test_the_stats_of_a_sandbox_name_its_fullest_folder(kind: Kind) -> None:
    async def main() -> None:
        async with opened(kind) as pool, pool.lease(replace(kind.spec(), disk_mib=16)) as sandbox:
            assert isinstance(sandbox, Lease)
            await sandbox.exec(["sh", "-c", "head -c 15000000 /dev/zero > /tmp/large"], timeout_s=20)
            found = await sandbox.stats()
            assert (found["disk_place"], found["disk_percent"]) in [("/tmp", percent) for percent in range(85, 96)]

    run(main)
