"""Sandboxes for tests of terminals, local, in Docker and behind a server, and the time that turns take in them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from envkit import clock
from envkit.http.client.sandbox_client import SandboxClient
from envkit.protocols import Sandbox
from envkit.sandbox.docker.images import OFFLINE_BASE
from envkit.types import SandboxSpec
from envkit.wiring.sandboxes.backends import open_tool_pool
from tests.http.envs import serving, slots

SPEC = SandboxSpec(memory_mib=256, pids=64, disk_mib=64)
TARGET_S = 0.010
"""Maximum median seconds of a turn in a terminal of a served sandbox, beside the command's own time."""


@asynccontextmanager
async def sandbox_of(kind: str, spec: SandboxSpec = SPEC) -> AsyncIterator[Sandbox]:
    """Lease a sandbox of a pool (``local``, ``docker``), or of a server in this process (``served``)."""
    async with open_tool_pool("local" if kind == "served" else kind) as pool:
        if kind == "served":
            async with (
                slots() as host,
                serving(host, pool=pool) as address,
                SandboxClient(address) as client,
                client.lease(spec) as sandbox,
            ):
                yield sandbox
        else:
            async with pool.lease(replace(spec, image=OFFLINE_BASE) if kind == "docker" else spec) as sandbox:
                yield sandbox


async def turn_times(use: Callable[[str], Awaitable[str]], turns: int) -> list[float]:
    """Return the seconds of each of `turns` commands whose own time is negligible, after a first one; sorted."""
    await use("echo first")
    times = []
    for turn in range(turns):
        began = clock.precise()
        text = await use(f"echo turn $(({turn}))")
        times.append(clock.precise() - began)
        assert f"turn {turn}" in text.splitlines()
    return sorted(times)
