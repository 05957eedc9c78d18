"""Starts nodes for sandboxes, ``envkit serve --node``, on the machines of a run, and restarts those that end."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from envkit import clock
from envkit.protocols import Launcher, Process
from envkit.restarts import Failures, RestartBudget
from envkit.types import Place

_MAX_LINE = 300


@asynccontextmanager
async def running_nodes(
    launcher: Launcher,
    names: Sequence[str],
    arguments: Sequence[str] = (),
    *,
    env: Mapping[str, str],
    budget: RestartBudget,
    announce: Callable[[str], None],
) -> AsyncIterator[Mapping[str, str]]:
    """Run a node for sandboxes on each of the nodes `names`; yield their addresses, by these names.

    Whether a node answers is the caller's affair. A node that ends is started again, as often as `budget` allows. All
    end with the block. The log of one that ended by itself stays.

    Args:
        launcher: Starts them.
        names: Names of nodes of the launcher.
        arguments: Further arguments of ``envkit serve``.
        env: Variables of the nodes, such as one with a token.
        budget: Restart budget of each node.
        announce: Receives a line for each end of a node, with its cause and its log.

    Raises:
        UsageError: There is no such node, or one cannot be started.
    """
    processes: dict[str, Process] = {}
    endpoints = {name: await launcher.endpoint(name) for name in names}

    async def start(name: str) -> None:
        host, port = endpoints[name]
        argv = [sys.executable, "-m", "envkit", "serve", "--node", "--host", host, "--port", str(port), *arguments]
        processes[name] = await launcher.start(argv, env, place=Place(name), name="node")

    async def keep(name: str) -> None:
        failures = Failures()
        while True:
            process = processes[name]
            why = await process.wait()
            last = await clock.to_thread(_last_line, process.log)
            due = failures.add(budget, now=clock.now())
            cause = f"{why} ({last})" if last and why not in last else why
            follows = due.spent or "it is started again"
            announce(f"the node for sandboxes on {name} {cause}; its log is {process.log}; {follows}")
            await process.kill()  # what is left of it
            await anyio.sleep_until(due.at)
            await start(name)

    try:
        for name in names:
            await start(name)
        async with clock.background_tasks() as tasks:
            for name in names:
                tasks.start_soon(keep, name)
            yield {name: f"http://{host}:{port}" for name, (host, port) in endpoints.items()}
    finally:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as ends:
                for process in processes.values():
                    ends.start_soon(process.kill)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:_MAX_LINE] for line in reversed(lines) if line.strip()), "")
