"""Count false losses: healthy sandboxes that are declared lost or suspect while all processors are busy. By default,
there are 100 containers (``--docker``) and 100 bubblewrap sandboxes (``--local``). Every second, a few of them run a
program. The exit status is 1 if a sandbox was declared lost or a program failed. Ctrl-C ends the measurement early.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from itertools import cycle

import anyio
from servers.processes import busy_processors
from settings import parsed, parser

from envkit import clock
from envkit.errors import EnvkitError
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.types import SandboxSpec, SandboxState

_ALARMS = (SandboxState.SUSPECT, SandboxState.LOST)
_CALLS = 4
"""Number of programs to start per second, each in another sandbox."""
_STARTING = 8


async def soak(settings: argparse.Namespace) -> bool:
    """Measure for the chosen time; return whether no sandbox was lost and all programs succeeded."""
    seen: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        nodes = {}
        if settings.docker:
            nodes["docker"] = Node("docker", await stack.enter_async_context(DockerBackend()))
        if settings.local:
            nodes["local"] = Node("local", await stack.enter_async_context(LocalBackend()))
        pools = {kind: await stack.enter_async_context(Pool([node])) for kind, node in nodes.items()}
        tasks = await stack.enter_async_context(anyio.create_task_group())
        for pool in pools.values():
            tasks.start_soon(_listen, pool, seen)
        turn = anyio.CapacityLimiter(_STARTING)
        names: list[tuple[Pool, str]] = []
        async with anyio.create_task_group() as starting:
            for kind, pool in pools.items():
                spec = SandboxSpec(image=settings.image if kind == "docker" else None)
                for index in range(getattr(settings, kind)):
                    starting.start_soon(partial(_start, turn, pool, f"{kind}-{index}", spec, names))
        print(f"{len(names)} sandboxes", flush=True)
        stack.enter_context(busy_processors())
        tasks.start_soon(_report, list(pools.values()), seen)
        with anyio.move_on_after(settings.minutes * 60):
            await _call(tasks, names, seen)
        tasks.cancel_scope.cancel()
    print(f"programs {seen['program']}, failed {seen['failed']}; suspect {seen['suspect']}, lost {seen['lost']}")
    return not seen["lost"] and not seen["failed"]


async def _start(
    turn: anyio.CapacityLimiter, pool: Pool, name: str, spec: SandboxSpec, names: list[tuple[Pool, str]]
) -> None:
    async with turn:
        await pool.create(name, spec)
    names.append((pool, name))


async def _listen(pool: Pool, seen: Counter[str]) -> None:
    async for event in pool.events():
        if event.state in _ALARMS:
            seen[event.state] += 1
            print(f"{event.state}: {event.sandbox_id}: {event.text}", flush=True)


async def _call(tasks: anyio.abc.TaskGroup, names: list[tuple[Pool, str]], seen: Counter[str]) -> None:
    turns = cycle(names)
    while True:
        for _ in range(_CALLS):
            tasks.start_soon(_run, *next(turns), seen)
        await anyio.sleep(1)


async def _run(pool: Pool, name: str, seen: Counter[str]) -> None:
    seen["program"] += 1
    try:
        result = await pool.get(name).exec(["true"], timeout_s=60)
        seen["failed"] += result.exit_code != 0
    except EnvkitError as error:
        seen["failed"] += 1
        print(f"{name}: {error}", flush=True)


async def _report(pools: list[Pool], seen: Counter[str]) -> None:
    begin = clock.now()
    while True:
        await anyio.sleep(60)
        slowest_s = max(max(pool.counts().probe_s.values()) for pool in pools)
        message = f"suspect {seen['suspect']}, lost {seen['lost']}, slowest probe {slowest_s * 1e3:.0f} ms"
        print(f"{(clock.now() - begin) / 60:3.0f} min: {message}, load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=float, default=30, help="duration in minutes")
    arguments.add_argument("--docker", type=int, default=100, help="number of containers")
    arguments.add_argument("--local", type=int, default=100, help="number of bubblewrap sandboxes")
    arguments.add_argument("--image", default="envkit/base:bookworm", help="image of the containers")
    settings = parsed(arguments, minutes=0.1, docker=2, local=2)
    try:
        sys.exit(not clock.run(soak, settings))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
