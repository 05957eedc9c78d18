"""One promise for the kinds of sandbox that outlive their owner: an orphan ends by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxError
from envkit.runs import owners
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.host import run_dirs
from envkit.wiring.sandboxes.service import list_detached_sandboxes
from tests.contract.kinds import KINDS, Kind, groups_of, run, sleepers, until
from tests.programs.program import Program

ORPHAN_TTL_S = 1.0

# Starts a sandbox of the given kind in which the marker sleeps, prints its id, and waits.
OWNER = """
import sys, anyio
from tests.contract.kinds import KINDS

async def main():
    kind, marker, orphan_ttl_s = sys.argv[1:]
    async with KINDS[kind].backend() as backend:
        spec = KINDS[kind].spec("sleep", marker, detached=True, orphan_ttl_s=float(orphan_ttl_s), ttl_s=120)
        print((await backend.start(spec)).id, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@dataclass(frozen=True)
class Stay:
    """A sandbox that stays, in which `marker` sleeps, and the process that started it."""

    sandbox_id: str
    owner: subprocess.Popen[str]


@pytest.fixture(
    params=[
        pytest.param("local", marks=[pytest.mark.bwrap, pytest.mark.detached]),
        pytest.param("docker", marks=pytest.mark.docker),
    ]
)
def lasting(request: pytest.FixtureRequest) -> Kind:
    """The kinds whose sandboxes can stay."""
    return KINDS[str(request.param)]


@pytest.fixture
def stay(lasting: Kind, marker: str) -> Iterator[Stay]:
    argv = [sys.executable, "-c", OWNER, lasting.name, marker, str(ORPHAN_TTL_S)]
    with Program(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as owner:
        try:
            assert owner.stdout is not None
            yield Stay(owner.stdout.readline().strip(), owner)
        finally:
            owner.kill()


def opened(kind: Kind) -> LocalBackend | DockerBackend:
    backend = kind.backend()
    assert isinstance(backend, LocalBackend | DockerBackend)
    return backend


def test_an_orphaned_detached_sandbox_that_is_inspected_ends_itself_and_leaves_nothing(
    lasting: Kind, stay: Stay, marker: str
) -> None:
    async def main() -> None:
        await until(lambda: len(sleepers(marker)) == 1)
        groups = groups_of(sleepers(marker)[0])
        began = clock.now()
        stay.owner.send_signal(signal.SIGKILL)
        stay.owner.wait(20)
        looks = 0
        while sleepers(marker) and clock.now() - began < 4 * ORPHAN_TTL_S:  # inspecting does not connect
            found = await list_detached_sandboxes(with_servers=True, warn=list[str]().append)
            looks += stay.sandbox_id in [one.id for one in found if not one.problem]
            await anyio.sleep(ORPHAN_TTL_S / 10)
        assert looks
        assert ORPHAN_TTL_S - 0.1 < clock.now() - began < ORPHAN_TTL_S + 3
        tail = stay.sandbox_id.partition("-")[2]
        # Bubblewrap, which owns the sandbox's folder, ends a moment after the programs of the sandbox.
        await until(lambda: all(owners.is_owner_gone(folder.name) for folder in run_dirs.of_tail(tail)))
        async with opened(lasting) as backend:
            if isinstance(backend, DockerBackend):
                with anyio.fail_after(10):
                    while stay.sandbox_id in await backend.list_detached():  # noqa: ASYNC110 - the daemon takes a moment
                        await anyio.sleep(0.05)
            with pytest.raises(SandboxError, match=f"there is no detached sandbox '{stay.sandbox_id}'"):
                await backend.attach(stay.sandbox_id)
            assert list(run_dirs.of_tail(tail)) == []
        await until(lambda: not any(map(Path.exists, groups)))

    run(main)


def test_a_detached_sandbox_runs_while_its_owner_or_a_client_is_connected(
    lasting: Kind, stay: Stay, marker: str
) -> None:
    async def main() -> None:
        await until(lambda: len(sleepers(marker)) == 1)
        await list_detached_sandboxes(with_servers=True, warn=list[str]().append)  # disconnects no client
        await anyio.sleep(ORPHAN_TTL_S + 0.5)
        assert len(sleepers(marker)) == 1
        async with opened(lasting) as backend:
            visited = await backend.attach(stay.sandbox_id)
            stay.owner.send_signal(signal.SIGKILL)
            stay.owner.wait(20)
            await anyio.sleep(ORPHAN_TTL_S + 0.5)
            assert (await visited.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"
            began = clock.now()
        await until(lambda: not sleepers(marker))
        assert ORPHAN_TTL_S - 0.1 < clock.now() - began < ORPHAN_TTL_S + 3

    run(main)


def test_detached_sandboxes_are_listed_by_their_ledger(lasting: Kind) -> None:
    async def main() -> None:
        async with opened(lasting) as backend:
            written = await backend.start(lasting.spec(detached=True, orphan_ttl_s=60.0, ledger="a-ledger-of-two"))
            loose = await backend.start(lasting.spec(detached=True, orphan_ttl_s=60.0))
            try:
                assert await backend.list_detached("a-ledger-of-two") == [written.id]
                nobodys = await backend.list_detached("")
                assert (loose.id in nobodys, written.id in nobodys) == (True, False)
                assert {loose.id, written.id} <= set(await backend.list_detached())
            finally:
                await loose.stop()
                await written.stop()

    run(main)
