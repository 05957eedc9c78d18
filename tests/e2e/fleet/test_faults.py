"""Faults of sandboxes of a real gateway: callers and `GET` get the cause in time.

Other causes are those of the backend: ``tests/contract/lifecycle/test_causes.py``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxLostError
from envkit.http.client.sandbox_client import SandboxClient
from envkit.types import SandboxView
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
