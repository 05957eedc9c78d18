"""Faults of sandboxes of a real gateway: callers and `GET` get the cause in time.

Other causes are those of the backend: ``tests/contract/lifecycle/test_causes.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxLostError, SandboxStartError
from envkit.http.client.sandbox_client import SandboxClient
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.types import SandboxSpec, SandboxView
from tests.contract.kinds import new_marker, sleepers, until
from tests.e2e.fleet.fleet import DOCKER, LOCAL, Gateway, run, serving
from tests.sandbox.containers import docker

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes outlive a server"),
    pytest.mark.xdist_group("faults"),
]

LATE_S = 10.0
"""Seconds for a loss to be detected beside other tests. Alone it takes at most 2, or 5 if the sandbox is paused."""


@pytest.fixture(scope="module", params=[LOCAL, DOCKER])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving(request.param, tmp_path_factory.mktemp("state"), "envs.sandboxes=1", "envs.warm=0") as running:
        yield running


async def kill(gateway: Gateway, victim: SandboxView) -> None:
    os.kill(gateway.first_pid(victim.backend_id), signal.SIGKILL)


async def pause(gateway: Gateway, victim: SandboxView) -> None:
    if gateway.kind == "docker":
        await clock.to_thread(docker, "pause", gateway.container(victim.backend_id))
    else:
        os.kill(gateway.first_pid(victim.backend_id), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("harm", "cause"), [(kill, "killed by signal 9 (SIGKILL)"), (pause, "paused, no answer for 4 s")]
)
def test_a_sandbox_that_was_killed_or_paused_is_soon_lost_with_its_cause(
    gateway: Gateway, harm: Callable[[Gateway, SandboxView], Awaitable[None]], cause: str
) -> None:
    marker = new_marker()

    async def call(client: SandboxClient, id: str) -> None:
        with pytest.raises(SandboxLostError) as error:
            await client.get(id).exec(["sleep", marker], timeout_s=60)
        assert str(error.value.cause) == cause

    async def main() -> None:
        async with SandboxClient(gateway.url) as client:
            victim = await client.create(f"victim-{marker}", gateway.spec(memory_mib=96))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call, client, victim.id)
                await until(lambda: bool(sleepers(marker)))
                with anyio.fail_after(LATE_S):
                    await harm(gateway, victim)
                    assert await gateway.becomes(victim.id, "lost") == cause
            await until(lambda: not sleepers(marker))

    run(main, 30)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A separate disk for the folders of sandboxes, with little more than the required free space."""
    folder = Path(f"/tmp/ek-{new_marker()[:6]}")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640m", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


@pytest.mark.bwrap
def test_a_start_is_rejected_while_the_disk_of_the_host_is_nearly_full(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(small_disk))

    async def main() -> None:
        async with LocalBackend() as backend:
            before = await backend.start(SandboxSpec())
            with (small_disk / "ballast").open("wb") as ballast:
                os.posix_fallocate(ballast.fileno(), 0, 200 << 20)
            with pytest.raises(SandboxStartError, match=r"only \d+ MiB are free in .* \(minimum 512\)"):
                await backend.start(SandboxSpec())
            assert (await before.exec(["echo", "on"], timeout_s=10)).stdout == "on\n"
            (small_disk / "ballast").unlink()
            await backend.start(SandboxSpec())

    run(main, 40)
