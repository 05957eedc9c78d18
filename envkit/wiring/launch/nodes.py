"""Starts nodes for sandboxes, ``envkit serve --node``, on the machines of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import anyio

from envkit.protocols import Launcher, Process
from envkit.types import Place


async def start_nodes(
    launcher: Launcher, names: Sequence[str], arguments: Sequence[str] = (), *, env: Mapping[str, str]
) -> list[tuple[str, Process]]:
    """Start a node for sandboxes on each of the nodes `names`; return their addresses and processes, in that order.

    If one cannot be started, end the others. Whether a node answers, and how long it may take, is the caller's affair.

    Args:
        launcher: Starts them.
        names: Names of nodes of the launcher.
        arguments: Further arguments of ``envkit serve``.
        env: Variables of the nodes, such as one with a token.

    Raises:
        UsageError: There is no such node, or one cannot be started.
    """
    started: list[tuple[str, Process]] = []
    try:
        for name in names:
            host, port = await launcher.endpoint(name)
            argv = [sys.executable, "-m", "envkit", "serve", "--node", "--host", host, "--port", str(port), *arguments]
            started.append((f"http://{host}:{port}", await launcher.start(argv, env, place=Place(name), name="node")))
    except BaseException:
        async with anyio.create_task_group() as tasks:
            for _, process in started:
                tasks.start_soon(process.kill)
        raise
    return started
