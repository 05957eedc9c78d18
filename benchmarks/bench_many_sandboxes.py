"""Many sandboxes at once in one pool: how much memory each takes, how fast each answers, and how long it takes to
stop them.

The sandboxes have no command, only a running agent; ``--docker 0`` or ``--local 0`` leaves out a backend. No
further sandbox is started while the machine has less than 4 GiB of free memory. Exits with status 1 if a sandbox was
lost, or if a process, container or folder is left at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from pathlib import Path

import anyio
from servers.processes import available_mib, family, pss_mib
from settings import parsed, parser
from waiting import Claim, Findings

from envkit import clock
from envkit.protocols import Sandbox
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.types import SandboxSpec

CLAIMS = (
    Claim("lease among docker sandboxes", "envkit", at_most=1000),
    Claim("true among docker sandboxes", "envkit", at_most=4),
    Claim("step of a shell among docker sandboxes", "envkit", at_most=2),
    Claim("lease among local sandboxes", "envkit", at_most=100),
    Claim("true among local sandboxes", "envkit", at_most=4),
    Claim("step of a shell among local sandboxes", "envkit", at_most=2),
)

_LEAST_MIB = 4096
_STARTING = 16
"""Maximum number of concurrent starts."""
_SHOWN = 100
"""Number of sandboxes between two progress lines."""


async def fill(findings: Findings, kind: str, number: int, settings: argparse.Namespace) -> bool:
    """Start `number` sandboxes, measure, and stop them; return whether no sandbox was lost and nothing is left."""
    spec = SandboxSpec(image=settings.image if kind == "docker" else None)
    free = available_mib()
    begin = clock.now()
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(DockerBackend() if kind == "docker" else LocalBackend())
        pool = await stack.enter_async_context(Pool([Node("here", backend)]))
        names = await start_all(pool, spec, number)
        print(f"{len(names)} {kind} sandboxes\n  all started in {clock.now() - begin:13.1f} s")
        await anyio.sleep(2)  # until memory that sandboxes need only while they start is free
        print(f"  memory of the machine {(free - available_mib()) / len(names):9.1f} MiB each")
        print(f"  of its processes {await clock.to_thread(_pss_mib, kind) / len(names):14.1f} MiB each", flush=True)
        await answer(findings, pool, spec, kind, [pool.get(name) for name in names], settings.calls)
        lost = [name for name in names if pool.view(name).state != "leased"]
        begin = clock.now()
    print(f"  all ended in {clock.now() - begin:16.1f} s")
    left = _left(kind)
    print(f"  lost meanwhile: {len(lost)}; left afterwards: {', '.join(left) or 'nothing'}", flush=True)
    return not left and not lost


async def start_all(pool: Pool, spec: SandboxSpec, number: int) -> list[str]:
    """Lease `number` sandboxes, fewer if memory runs low, and return their names."""
    names: list[str] = []
    turn = anyio.CapacityLimiter(_STARTING)

    async def start(name: str) -> None:
        async with turn:
            if available_mib() < _LEAST_MIB:
                return
            await pool.create(name, spec)
            names.append(name)
            if len(names) % _SHOWN == 0:
                print(f"  ... {len(names)}", flush=True)

    async with anyio.create_task_group() as tasks:
        for index in range(number):
            tasks.start_soon(start, f"sandbox-{index}")
    return names


async def answer(
    findings: Findings, pool: Pool, spec: SandboxSpec, kind: str, sandboxes: list[Sandbox], calls: int
) -> None:
    """Measure leases of further sandboxes, and calls to all sandboxes in turn."""
    further = count()

    async def lease() -> Callable[[], Awaitable[None]]:
        name = f"further-{next(further)}"
        await pool.create(name, spec)
        return partial(pool.stop, name)

    turns = count()
    shells = [sandbox.shell("main") for sandbox in sandboxes[:_SHOWN]]

    async def execute() -> None:
        result = await sandboxes[next(turns) % len(sandboxes)].exec(["true"], timeout_s=10)
        assert result.exit_code == 0, result

    async def step() -> None:
        result = await shells[next(turns) % len(shells)].run("true", timeout_s=10)
        assert result.exit_code == 0, result

    for _ in shells:  # a shell starts with its first command
        await step()
    await findings.latency(f"lease among {kind} sandboxes", {"envkit": lease}, number=calls // 50, rounds=1)
    await findings.latency(f"true among {kind} sandboxes", {"envkit": execute}, number=calls, rounds=1)
    await findings.latency(f"step of a shell among {kind} sandboxes", {"envkit": step}, number=calls, rounds=1)


def _pss_mib(kind: str) -> float:
    """Return the memory of our sandboxes' processes in MiB, without this process."""
    if kind == "local":
        return pss_mib(family([os.getpid()])[1:])
    ours = set(_containers())
    shims = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if ours & {word.decode() for word in _words(path)}
    ]
    return pss_mib(family(shims))


def _words(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:  # the process has just ended
        return []


def _containers() -> list[str]:
    """Return the ids of our containers, including stopped containers."""
    form = '{{.Label "envkit.owner"}} {{.ID}}'
    command = ["docker", "ps", "--all", "--no-trunc", "--filter", "label=envkit.owner", "--format", form]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line.split()[1] for line in lines if f"-{os.getpid()}-" in line]


def _left(kind: str) -> list[str]:
    """Return the containers, processes and folders that our sandboxes left behind."""
    if kind == "docker":
        return [f"container {id}" for id in _containers()]
    folders = [str(path) for path in Path("/tmp").glob(f"envkit-*-{os.getpid()}-*")]
    return [*(f"process {pid}" for pid in family([os.getpid()])[1:]), *folders]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--docker", type=int, default=200, metavar="COUNT", help="number of containers")
    arguments.add_argument("--local", type=int, default=1000, metavar="COUNT", help="number of bubblewrap sandboxes")
    arguments.add_argument("--image", default="envkit/base:bookworm", help="image of the containers")
    arguments.add_argument("--calls", type=int, default=1000, help="number of single calls; one in 50 is a lease")
    settings = parsed(arguments, docker=2, local=4, calls=50)
    findings = Findings()
    print(f"{len(os.sched_getaffinity(0))} processors, load average before: {os.getloadavg()[0]:.1f}")
    are_clean = [
        clock.run(partial(fill, findings, kind, number, settings), fast=True)
        for kind, number in (("docker", settings.docker), ("local", settings.local))
        if number
    ]
    print(f"Load average after: {os.getloadavg()[0]:.1f}")
    if not all(are_clean):
        sys.exit("sandboxes were lost, or something is left; see above")
    findings.check([claim for claim in CLAIMS if vars(settings)[claim.what.split()[-2]]], is_strict=not settings.quick)


if __name__ == "__main__":
    main()
