"""Containers that a killed process left with the daemon are removed."""

from __future__ import annotations

import os

import anyio
import pytest

from envkit.sandbox.docker.api import Daemon
from envkit.types import JSON
from tests.contract.kinds import run
from tests.sandbox.containers import image

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
