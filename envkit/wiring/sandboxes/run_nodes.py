"""The nodes for sandboxes that a run starts on its machines (``placement.nodes``)."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from envkit import clock
from envkit.config.parts import BuiltInSandboxSection
from envkit.errors import UsageError
from envkit.http.client.env_client import TOKEN_VARIABLE
from envkit.http.protocol.node_messages import JoinFrame
from envkit.protocols import Launcher, Process
from envkit.restarts import Failures
from envkit.sandbox.pool import Pool
from envkit.types import Place
from envkit.wiring.gateway.remote_nodes import RemoteNodes

_START_S = 60.0
_POLL_S = 0.1
_MAX_LINE = 300


@dataclass(frozen=True, slots=True)
class RunNodes:
    """Nodes that run, whose sandboxes any pool of the run may use; see `RemoteNodes` for the attributes.

    `addresses` always has the present address of each node.
    """

    addresses: Collection[JoinFrame]
    in_image: bool
    lost_s: float

    @asynccontextmanager
    async def used_by(self, pool: Pool) -> AsyncIterator[None]:
        """Keep the nodes in `pool` while they answer. The block begins when each has answered, or after a minute.

        Raises:
            UsageError: None has answered.
        """
        in_image, lost_s = self.in_image, self.lost_s
        async with RemoteNodes(self.addresses, file=None, in_image=in_image, isolates=None, lost_s=lost_s) as nodes:
            with anyio.move_on_after(_START_S):
                while len(nodes.nodes) < len(self.addresses):  # noqa: ASYNC110 - a node may also be lost again
                    await anyio.sleep(_POLL_S)
            if not nodes.nodes:
                why = "; ".join(f"{one.node}: {one.why}" for one in nodes.states())
                raise UsageError(f"placement.nodes: no node for sandboxes answered within {_START_S:g} s: {why}")
            nodes.attach(pool)
            yield


@asynccontextmanager
async def run_nodes(
    launcher: Launcher, names: Sequence[str], section: BuiltInSandboxSection, announce: Callable[[str], None]
) -> AsyncIterator[RunNodes]:
    """Run a node for sandboxes, ``envkit serve --node``, on each of the nodes `names` of a launcher.

    A node that ends is started again at another port, within the restart budget of `section`; `announce` receives a
    line with its cause and its log, which stays. All end with the block.

    Raises:
        UsageError: There is no such node, or one cannot be started.
    """
    token, budget = secrets.token_urlsafe(32), section.restarts.limit()
    chosen = () if section.kind == "auto" else ("--backend", section.kind)
    addresses: dict[str, JoinFrame] = {}
    processes: dict[str, Process] = {}

    async def start(name: str) -> None:
        host, port = await launcher.endpoint(name)
        addresses[name] = JoinFrame(name, f"http://{host}:{port}", token)
        argv = [sys.executable, "-m", "envkit", "serve", "--node", "--host", host, "--port", str(port), *chosen]
        processes[name] = await launcher.start(argv, {TOKEN_VARIABLE: token}, place=Place(name), name="node")

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
            await anyio.sleep_until(due.at)
            await start(name)

    try:
        for name in names:
            await start(name)
        async with clock.background_tasks() as tasks:
            for name in names:
                tasks.start_soon(keep, name)
            announce(f"sandbox: on the nodes {', '.join(names)}")
            yield RunNodes(addresses.values(), section.kind == "docker", section.liveness.lost_s)
    finally:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as ends:
                for process in processes.values():
                    ends.start_soon(process.kill)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:_MAX_LINE] for line in reversed(lines) if line.strip()), "")
