"""Pools of real sandboxes: losses are detected in time with their cause, and nothing is left."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from envkit import clock
from envkit.errors import EnvkitError
from envkit.protocols import Sandbox, SandboxBackend
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.event_log import LedgerStore
from envkit.sandbox.pool.lease import Lease
from envkit.sandbox.pool.node import Capacity, Node
from envkit.sandbox.pool.reattach import Attaches
from envkit.sandbox.pool.warm_stock import WarmSpec
from envkit.types import Phase, SandboxSpec, SandboxState, SandboxView
from tests.contract.kinds import KINDS, Kind, run, traces, until
from tests.keys import key
from tests.sandbox.pool.pools import FakeLedger

PARAMS = [
    pytest.param("local", marks=[pytest.mark.bwrap, pytest.mark.limits]),
    pytest.param("docker", marks=pytest.mark.docker),
]


@pytest.fixture(params=PARAMS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@asynccontextmanager
async def opened(kind: Kind, stocks: Sequence[WarmSpec] = (), ledger: LedgerStore | None = None) -> AsyncIterator[Pool]:
    async with (
        kind.backend() as backend,
        Pool([Node("here", backend, Capacity(sandboxes=8))], stocks=stocks, ledger=ledger) as pool,
    ):
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


async def leave(
    backend: SandboxBackend, ledger: FakeLedger, id: str, spec: SandboxSpec, state: SandboxState
) -> Sandbox:
    """Start a sandbox, leave it running as a killed server does, and record it."""
    sandbox = await backend.start(replace(spec, detached=True, orphan_ttl_s=60, ledger=ledger.id))
    phases = (Phase(SandboxState.STARTING, 1.0, ""), Phase(state, 2.0, ""))
    ledger.views[key(id)] = SandboxView(id, sandbox.id, "here", "", spec, phases)
    return sandbox


def test_unrecorded_sandboxes_of_an_earlier_server_are_removed_and_those_of_others_are_not(kind: Kind) -> None:
    before = traces()
    ledger, other = FakeLedger(), FakeLedger()
    ledger.id, other.id = secrets.token_hex(8), secrets.token_hex(8)

    async def main() -> None:
        spec = kind.spec(memory_mib=32)
        async with kind.backend() as backend:
            known = await leave(backend, ledger, "a", spec, SandboxState.LEASED)
            started = await leave(backend, ledger, "b", spec, SandboxState.LEASED)
            ledger.views[key("b")] = SandboxView("b", "", "here", "", spec, (Phase(SandboxState.STARTING, 1.0, ""),))
            others = await leave(backend, other, "a", spec, SandboxState.LEASED)
            unowned = await backend.start(replace(spec, detached=True, orphan_ttl_s=60))
        async with kind.backend() as backend, Pool([Node("here", backend)], ledger=ledger) as pool:
            assert isinstance(backend, Attaches)
            assert await backend.list_detached(ledger.id) == [known.id]
            assert await pool.get("a").probe(5) < 5
            assert pool.view("b").state is SandboxState.STOPPED
            with pytest.raises(EnvkitError):
                await backend.attach(started.id)
            for sandbox in (others, unowned):
                assert await (await backend.attach(sandbox.id)).probe(5) < 5
                await backend.remove(sandbox.id)

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
