"""The cost of a node: exec, step and episodes through a gateway and nodes, compared with the gateway's own machine.

All programs run on this machine, so the nodes take processor time from the others. For this reason, many episodes are
measured twice: with steps that wait so briefly that the processors are always busy, and with steps that wait so long
that the processors are idle for a part of the time, as those of a machine of its own are.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `settings`
from servers.processes import cpu_s, idle_s
from servers.served import ECHO, WAIT
from servers.serving import Server, gateway, node
from settings import parsed, parser
from waiting import CallBy, Claim, Findings

from envkit import clock
from envkit.http.client.env_client import EnvClient
from envkit.http.client.sandbox_client import SandboxClient
from envkit.types import SandboxSpec, Task

OWN, NODE = "own machine", "node"
PARTS = ("client", "gateway", "nodes", "sandboxes")
BUSY, IDLE = "episodes at once, processors busy", "episodes at once, processors partly idle"
CLAIMS = (
    Claim("exec of true", NODE, at_most=1.6, peers=[OWN]),
    Claim("step", NODE, at_most=1.6, peers=[OWN]),
    Claim(BUSY, NODE, at_least=0.9, peers=[OWN]),
    Claim(IDLE, NODE, at_least=0.9, peers=[OWN]),
)


class Fleet(NamedTuple):
    """A gateway, and its nodes, if it has some."""

    server: Server
    nodes: tuple[Server, ...] = ()

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds that each of `PARTS` has used so far; the client is this process."""
        alone = partial(cpu_s, descendants=False)
        gateway_s, nodes_s = alone(self.server.pid), sum(alone(one.pid) for one in self.nodes)
        all_s = sum(one.cpu_s() for one in (self.server, *self.nodes))
        return dict(zip(PARTS, (alone(os.getpid()), gateway_s, nodes_s, all_s - gateway_s - nodes_s), strict=True))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--backend", default="process", help="backend of all sandboxes")
    arguments.add_argument("--calls", type=int, default=400, help="number of single calls per contestant")
    arguments.add_argument("--rounds", type=int, default=10, help="rounds of which the median counts")
    arguments.add_argument("--many-rounds", type=int, default=5, help="the same for many episodes at once")
    arguments.add_argument("--episodes", type=int, default=1024, help="number of episodes at once, also per round")
    arguments.add_argument("--steps", type=int, default=20, help="number of steps per episode")
    arguments.add_argument("--wait-s", type=float, default=0.05, help="seconds that a step waits, processors busy")
    arguments.add_argument("--long-wait-s", type=float, default=0.2, help="the same, processors partly idle")
    settings = parsed(arguments, calls=4, rounds=1, many_rounds=1, episodes=8, steps=2, long_wait_s=0.05)
    findings = Findings()
    print(f"{len(os.sched_getaffinity(0))} processors, load average before: {os.getloadavg()[0]:.1f}")
    clock.run(partial(measured, findings, settings), fast=True)
    print(f"Load average after: {os.getloadavg()[0]:.1f}")
    findings.check(CLAIMS, is_strict=not settings.quick)


async def measured(findings: Findings, settings: argparse.Namespace) -> None:
    """Measure single calls and many episodes at once, with the same servers."""
    async with fleets(settings.backend) as found:
        await single_calls(findings, found, settings.calls, settings.rounds)
        sizes = (settings.many_rounds, settings.episodes, settings.steps)
        await many(findings, found, *sizes, {BUSY: settings.wait_s, IDLE: settings.long_wait_s})


@asynccontextmanager
async def fleets(backend: str) -> AsyncIterator[Mapping[str, Fleet]]:
    """Start a gateway with its own sandboxes, and one with two nodes."""
    envs = ("--set", "envs.sandboxes=2", "--set", "envs.warm=0", "--set", "envs.capacity=2048")
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(gateway("--backend", backend, *envs))
        members = [await stack.enter_async_context(node("--backend", backend)) for _ in range(2)]
        urls = ", ".join(f"{{url: '{one.url}'}}" for one in members)
        words = ("--backend", "nodes", "--set", f"nodes=[{urls}]", *envs)
        yield {OWN: Fleet(own), NODE: Fleet(await stack.enter_async_context(gateway(*words)), tuple(members))}


async def single_calls(findings: Findings, found: Mapping[str, Fleet], calls: int, rounds: int) -> None:
    """Measure one exec after another, and one step after another."""
    async with AsyncExitStack() as stack:
        execs, steps = {}, {}
        for name, fleet in found.items():
            client = await stack.enter_async_context(SandboxClient(fleet.server.url))
            sandbox = await stack.enter_async_context(client.lease(SandboxSpec()))
            execs[name] = partial(sandbox.exec, ["true"], timeout_s=30)
            envs = await stack.enter_async_context(EnvClient(fleet.server.url))
            episode = await stack.enter_async_context(envs.lease(Task(ECHO, 0, {})))
            await episode.reset()
            steps[name] = partial(episode.step, "x")
        for what, each in (("exec of true", execs), ("step", steps)):
            before = {name: fleet.cpu_s() for name, fleet in found.items()}
            await findings.latency(what, each, number=calls, rounds=rounds)
            for name, fleet in found.items():
                used_s = sum(fleet.cpu_s()[part] - before[name][part] for part in PARTS[1:])
                print(f"  {name:20} {1000 * used_s / (calls + 1):9.3g} ms of processor each")


async def many(
    findings: Findings,
    found: Mapping[str, Fleet],
    rounds: int,
    episodes: int,
    steps: int,
    waits_s: Mapping[str, float],
) -> None:
    """Measure many episodes at once, whose steps wait. In each round, every caller plays one."""
    used: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    async with AsyncExitStack() as stack:

        def read(name: str) -> dict[str, float]:
            return {**found[name].cpu_s(), "idle": idle_s(), "wall": clock.stopwatch()}

        @contextmanager
        def count(name: str) -> Iterator[None]:
            before = read(name)
            yield
            for part, value in read(name).items():
                used[name][part] += value - before[part]

        clients = {name: await stack.enter_async_context(EnvClient(one.server.url)) for name, one in found.items()}
        for what, wait_s in waits_s.items():
            used.clear()
            calls: dict[str, CallBy] = {name: partial(_play, envs, steps, wait_s) for name, envs in clients.items()}
            await findings.rate(what, calls, callers=episodes, rounds=rounds, round_s=0, around=count)
            for name, each in used.items():
                each_ms = {part: 1000 * each[part] / (rounds * episodes * steps) for part in PARTS}
                parts = ", ".join(f"{part} {ms:.3f}" for part, ms in each_ms.items())
                print(f"  {name:20} {sum(each_ms.values()):9.3f} ms of processor a step: {parts}", end="; ")
                print(
                    f"processors idle for {each['idle'] / each['wall'] / len(os.sched_getaffinity(0)):.0%}", flush=True
                )


async def _play(envs: EnvClient, steps: int, wait_s: float, caller: int) -> int:
    async with envs.lease(Task(WAIT, caller, {"wait_s": wait_s})) as episode:
        await episode.reset()
        for _ in range(steps):
            await episode.step("x")
    return 1


if __name__ == "__main__":
    main()
