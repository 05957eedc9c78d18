"""The cost of a node: exec and step through a gateway and a node, compared with the gateway's own machine.

All programs run on this machine, so the node takes processor time from the others: a fleet on several machines is
faster. ``--waiting`` measures steps that wait 50 ms, of many episodes at once, over two nodes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `settings`
from servers.served import ECHO, WAIT
from servers.serving import Server, gateway, node
from settings import parsed, parser
from waiting import CallBy, Claim, Findings

from envkit import clock
from envkit.http.client.env_client import EnvClient
from envkit.http.client.sandbox_client import SandboxClient
from envkit.protocols import Episode
from envkit.types import SandboxSpec, Task

OWN, NODE = "own machine", "node"
CLAIMS = (
    Claim("exec of true", NODE, at_most=1.6, peers=[OWN]),
    Claim("step", NODE, at_most=1.6, peers=[OWN]),
    Claim("steps of many episodes that wait 50 ms", NODE, at_least=0.9, peers=[OWN]),
)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--backend", default="process", help="backend of all sandboxes")
    arguments.add_argument("--calls", type=int, default=400, help="number of single calls per contestant")
    arguments.add_argument("--rounds", type=int, default=10, help="rounds of which the median counts")
    arguments.add_argument("--waiting", type=int, default=1024, help="number of episodes at once whose steps wait")
    arguments.add_argument("--round-s", type=float, default=6, help="seconds per round with many episodes")
    settings = parsed(arguments, calls=4, rounds=1, waiting=8, round_s=0.5)
    findings = Findings()
    print(f"{len(os.sched_getaffinity(0))} processors, load average before: {os.getloadavg()[0]:.1f}")
    clock.run(partial(single_calls, findings, settings.backend, settings.calls, settings.rounds), fast=True)
    clock.run(partial(many, findings, settings.backend, settings.waiting, settings.rounds, settings.round_s), fast=True)
    print(f"Load average after: {os.getloadavg()[0]:.1f}")
    findings.check(CLAIMS, is_strict=not settings.quick)


@asynccontextmanager
async def fleets(backend: str, nodes: int) -> AsyncIterator[dict[str, tuple[Server, Callable[[], float]]]]:
    """Start a gateway with its own sandboxes, and one with nodes; yield both, with the CPU seconds that each used."""
    envs = ("--set", "envs.sandboxes=2", "--set", "envs.warm=0", "--set", "envs.capacity=2048")
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(gateway("--backend", backend, *envs))
        members = [await stack.enter_async_context(node("--backend", backend)) for _ in range(nodes)]
        urls = ", ".join(f"{{url: '{one.url}'}}" for one in members)
        words = ("--backend", "nodes", "--set", f"nodes=[{urls}]", *envs)
        remote = await stack.enter_async_context(gateway(*words))

        def cpu_s() -> float:
            return remote.cpu_s() + sum(one.cpu_s() for one in members)

        yield {OWN: (own, own.cpu_s), NODE: (remote, cpu_s)}


async def single_calls(findings: Findings, backend: str, calls: int, rounds: int) -> None:
    """Measure one exec after another, and one step after another."""
    async with fleets(backend, 1) as found, AsyncExitStack() as stack:
        execs, steps = {}, {}
        for name, (server, _) in found.items():
            client = await stack.enter_async_context(SandboxClient(server.url))
            sandbox = await stack.enter_async_context(client.lease(SandboxSpec()))
            execs[name] = partial(sandbox.exec, ["true"], timeout_s=30)
            envs = await stack.enter_async_context(EnvClient(server.url))
            episode = await stack.enter_async_context(envs.lease(Task(ECHO, 0, {})))
            await episode.reset()
            steps[name] = partial(episode.step, "x")
        for what, each in (("exec of true", execs), ("step", steps)):
            used = {name: cpu_s() for name, (_, cpu_s) in found.items()}
            await findings.latency(what, each, number=calls, rounds=rounds)
            for name, (_, cpu_s) in found.items():
                print(f"  {name:20} {1000 * (cpu_s() - used[name]) / (calls + 1):9.3g} ms of processor each")


async def many(findings: Findings, backend: str, episodes: int, rounds: int, round_s: float) -> None:
    """Measure steps that wait, of many episodes at once."""
    async with fleets(backend, 2) as found, AsyncExitStack() as stack:
        calls: dict[str, CallBy] = {}
        for name, (server, _) in found.items():
            envs = await stack.enter_async_context(EnvClient(server.url))
            players = [await _began(stack, envs, number) for number in range(episodes)]
            calls[name] = partial(_step, players)
        used = {name: cpu_s() for name, (_, cpu_s) in found.items()}
        await findings.rate(CLAIMS[2].what, calls, callers=episodes, rounds=max(rounds // 3, 1), round_s=round_s)
        for name, (_, cpu_s) in found.items():
            print(f"  {name:20} {cpu_s() - used[name]:9.3g} s of processor")


async def _began(stack: AsyncExitStack, envs: EnvClient, number: int) -> Episode:
    episode = await stack.enter_async_context(envs.lease(Task(WAIT, number, {})))
    await episode.reset()
    return episode


async def _step(players: list[Episode], caller: int) -> int:
    await players[caller].step("x")
    return 1


if __name__ == "__main__":
    main()
