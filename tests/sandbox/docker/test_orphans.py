"""Containers that a killed process or a cancelled start left with the daemon are removed."""

from __future__ import annotations

import asyncio
import os

import anyio
import pytest

from envkit.sandbox.docker.api import Daemon
from envkit.sandbox.docker.backend import DockerBackend
from envkit.types import JSON, SandboxSpec
from tests.contract.kinds import run
from tests.sandbox.containers import containers_of, image

pytestmark = pytest.mark.docker


def test_removing_a_container_that_is_being_removed_waits_until_it_is_gone() -> None:
    labels: dict[str, JSON] = {"envkit.test": f"removal-{os.getpid()}"}
    options: dict[str, JSON] = {"Image": image(), "Cmd": ["sleep", "60"], "Labels": labels}

    async def main() -> None:
        daemon = await Daemon.connect()
        for is_started in (False, True, True):
            container = await daemon.create(options)
            if is_started:
                await daemon.start(container)

            async def remove(container: str = container) -> None:
                await daemon.remove(container)
                assert await daemon.inspect(container) is None

            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(remove)
        await daemon.remove("no-such-container")
        await daemon.close()

    run(main)


def test_a_start_whose_task_is_cancelled_from_outside_leaves_nothing_once_the_backend_is_left() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            for moment_s in (0.04, 0.02, 0.01, 0.005):
                task = asyncio.ensure_future(backend.start(SandboxSpec(image=image())))
                await anyio.sleep(moment_s)
                task.cancel()
                await asyncio.wait([task])
        for number in range(1, 5):
            assert containers_of(f"docker-{number}") == []

    run(main)
