"""Faults of sandboxes of a real gateway: callers and `GET` get the cause in time."""

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
from envkit.types import SandboxSpec, SandboxView
from tests.contract.kinds import new_marker, sleepers, until
from tests.e2e.fleet.fleet import DOCKER, LOCAL, NOTHING, Gateway, run, serving
from tests.sandbox.containers import docker

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes outlive a server"),
    pytest.mark.xdist_group("faults"),
]

LATE_S = 10.0
"""Seconds for a loss to be detected beside other tests. Alone it takes at most 2, or 5 if the sandbox is paused."""

WAIT = "until [ -e go ]; do sleep 0.02; done; "
EAT = "hoard = []\nwhile True: hoard.append(bytearray(1 << 22))"

Harm = Callable[[Gateway, SandboxView], Awaitable[None]]
"""Damages a sandbox."""


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


async def go(gateway: Gateway, victim: SandboxView) -> None:
    """Let its program continue."""
    async with SandboxClient(gateway.url) as client:
        await client.get(victim.id).write("go", b"")


async def lost(gateway: Gateway, spec: SandboxSpec, harm: Harm) -> tuple[float, float, set[str]]:
    """Damage a sandbox in which a call is in progress.

    Returns:
        Seconds until that call raised, seconds until `GET` showed the loss, and the causes that both reported.
    """
    causes = []
    raised_s = 0.0
    began = 0.0
    marker = new_marker()
    async with SandboxClient(gateway.url) as client:
        victim = await client.create(f"victim-{marker}", spec)

        async def call() -> None:
            nonlocal raised_s
            with pytest.raises(SandboxLostError) as error:
                await client.get(victim.id).exec(["sleep", marker], timeout_s=60)
            raised_s = clock.now() - began
            causes.append(str(error.value.cause))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await until(lambda: bool(sleepers(marker)))
            began = clock.now()
            await harm(gateway, victim)
            causes.append(await gateway.becomes(victim.id, "lost"))
            seen_s = clock.now() - began
        await until(lambda: not sleepers(marker))
    return raised_s, seen_s, set(causes)


@pytest.mark.parametrize(
    ("command", "harm", "cause"),
    [
        pytest.param("", kill, "killed by signal 9 (SIGKILL)", id="killed"),
        pytest.param(WAIT + "echo bye >&2; exit 3", go, "exited with code 3: bye", id="exited"),
        pytest.param(WAIT + "exec $PYTHON -c '" + EAT + "'", go, "out of memory", id="out-of-memory"),
    ],
)
def test_a_sandbox_that_ended_is_soon_lost_with_its_cause(
    gateway: Gateway, command: str, harm: Harm, cause: str
) -> None:
    async def main() -> None:
        program = ("sh", "-c", command.replace("$PYTHON", gateway.python)) if command else ()
        raised_s, seen_s, causes = await lost(gateway, gateway.spec(*program, memory_mib=96), harm)
        assert causes == {cause}
        assert max(raised_s, seen_s) < LATE_S

    run(main, 30)


def test_a_paused_sandbox_is_soon_lost_with_its_cause(gateway: Gateway) -> None:
    async def main() -> None:
        raised_s, seen_s, causes = await lost(gateway, gateway.spec(), pause)
        assert causes == {"paused, no answer for 4 s"}
        assert max(raised_s, seen_s) < LATE_S

    run(main, 30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate disk for the folders of sandboxes, with little more than the required free space."""
    folder = Path(f"/tmp/ek-{new_marker()[:6]}")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640m", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


@pytest.mark.parametrize("kind", [LOCAL])
def test_a_start_is_rejected_while_the_disk_of_the_host_is_nearly_full(
    kind: str, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(small_disk))

    async def main(gateway: Gateway) -> None:
        async with SandboxClient(gateway.url) as client:
            await client.create("before", gateway.spec())
            with (small_disk / "ballast").open("wb") as ballast:
                os.posix_fallocate(ballast.fileno(), 0, 200 << 20)
            with pytest.raises(SandboxStartError, match=r"only \d+ MiB are free in .* \(minimum 512\)"):
                await client.create("a", gateway.spec())
            assert (await client.get("before").exec(["echo", "on"], timeout_s=10)).stdout == "on\n"
            (small_disk / "ballast").unlink()
            await client.create("after", gateway.spec())
        assert await gateway.end() == 0
        assert gateway.left() == NOTHING

    with serving(kind, tmp_path, "envs.sandboxes=1", "envs.warm=0") as gateway:
        run(lambda: main(gateway), 40)
