"""How long a sandbox takes to start, to run a program or a command of a persistent shell, and to transfer 1 MiB.

Compares two of envkit's backends with SWE-ReX and ROCK, also with 16 concurrent callers. Run it with the
interpreter that has the peers, ``.venv/sandboxes/bin/python``; a missing peer is left out. ``--rock URL`` uses a
running ROCK server; by default, one is started. All containers use ``--image``, which must exist and contain bash and
the libraries that Python needs (libssl, libffi); ``docker/with-base`` makes the default image.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

from servers.docker_run import Plain
from servers.peers_sandboxes import FILE, Contestant, MissingPeerError, docker_on_loopback, rock, swerex
from servers.processes import busy_processors
from settings import parsed, parser
from waiting import Call, CallBy, Claim, Findings

from envkit import clock
from envkit.protocols import Sandbox, SandboxBackend
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker.backend import DockerBackend
from envkit.types import SandboxSpec

CLAIMS = (
    Claim("start, idle machine", "envkit local", at_most=40),
    Claim("start, all processors busy", "envkit local", at_most=40),
    Claim("bash -c true in bubblewrap", "envkit local", at_most=2),
    Claim("step of a shell in bubblewrap", "envkit local", at_most=0.4),
    Claim("start of a container", "envkit docker", at_most=1.2, peers=["docker run -d"]),
    Claim("bash -c true", "envkit docker", at_most=2.5),
    Claim("step of a shell", "envkit docker", at_most=0.8),
    Claim("step of a shell", "envkit docker", at_least=100, peers=["SWE-ReX", "ROCK"]),
    Claim("write 1 MiB", "envkit docker", at_most=10),
    Claim("read 1 MiB", "envkit docker", at_most=10),
    Claim("steps of 16 shells", "envkit docker", at_least=20, peers=["SWE-ReX"]),
    Claim("true, 16 callers", "envkit docker", at_least=4, peers=["SWE-ReX"]),
)

CALLERS = 16
BASH = ("bash", "-c", "true")
MIB = b"0123456789abcde\n" * (1 << 16)


class Own:
    """A sandbox of envkit, with the same interface as the peers' sandboxes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._shells = [sandbox.shell(str(number)) for number in range(CALLERS)]

    async def execute(self, *argv: str) -> None:
        result = await self._sandbox.exec(argv, timeout_s=10)
        assert result.exit_code == 0, result

    async def open_shell(self, shell: int) -> None:
        await self.step(shell)

    async def step(self, shell: int) -> None:
        result = await self._shells[shell].run("true", timeout_s=10)
        assert result.exit_code == 0, result

    async def write(self, content: bytes) -> None:
        await self._sandbox.write(FILE, content)

    async def read(self) -> bytes:
        return await self._sandbox.read(FILE)


async def bubblewrap(findings: Findings, settings: argparse.Namespace) -> None:
    """Measure bubblewrap sandboxes, without peers."""
    name = "envkit local"
    async with LocalBackend() as backend:
        for what, start in (("start", starting), ("start and bash -c true", starting_and_using)):
            turns: dict[str, Call] = {name: partial(start, backend, SandboxSpec())}
            await findings.latency(f"{what}, idle machine", turns, number=settings.starts, rounds=1)
            with busy_processors():
                await findings.latency(f"{what}, all processors busy", turns, number=settings.starts, rounds=1)
        own = Own(await backend.start(SandboxSpec()))
        await own.open_shell(0)
        for what, call in (("bash -c true", partial(own.execute, *BASH)), ("step of a shell", partial(own.step, 0))):
            await findings.latency(f"{what} in bubblewrap", {name: call}, number=settings.calls, rounds=1)


async def containers(findings: Findings, settings: argparse.Namespace) -> None:
    """Measure envkit's containers and those of the peers, in turns."""
    program = shutil.which("docker")
    if program is None:
        sys.exit("there is no docker on PATH")
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(DockerBackend())
        spec = SandboxSpec(image=settings.image)
        sandbox = await backend.start(spec)
        plain = Plain(program, sandbox.id)
        starts: dict[str, Call] = {"envkit docker": partial(starting, backend, spec), "docker run -d": plain.starting}
        await findings.latency("start of a container", starts, number=settings.starts, rounds=settings.starts)

        stack.enter_context(docker_on_loopback(program))
        contestants: dict[str, Contestant] = {"envkit docker": Own(sandbox)}
        for name, peer in (("SWE-ReX", swerex(settings.image)), ("ROCK", rock(settings.rock, settings.image))):
            try:
                contestants[name] = await stack.enter_async_context(peer)
            except MissingPeerError as error:
                print(f"  left out: {name}: {error}", flush=True)
        for contestant in contestants.values():
            for shell in range(CALLERS):
                await contestant.open_shell(shell)
        await calls(findings, contestants, settings)


async def calls(findings: Findings, contestants: dict[str, Contestant], settings: argparse.Namespace) -> None:
    one: dict[str, Callable[[Contestant], Awaitable[object]]] = {
        "bash -c true": lambda contestant: contestant.execute(*BASH),
        "step of a shell": lambda contestant: contestant.step(0),
        "write 1 MiB": lambda contestant: contestant.write(MIB),
        "read 1 MiB": reading,
    }
    for what, call in one.items():
        turns: dict[str, Call] = {name: partial(call, contestant) for name, contestant in contestants.items()}
        await findings.latency(what, turns, number=settings.calls, rounds=settings.rounds)
    many: dict[str, Callable[[Contestant, int], Awaitable[object]]] = {
        "steps of 16 shells": lambda contestant, caller: contestant.step(caller),
        "true, 16 callers": lambda contestant, _: contestant.execute("true"),
        "bash -c true, 16 callers": lambda contestant, _: contestant.execute(*BASH),
    }
    for what, call_by in many.items():
        sides: dict[str, CallBy] = {name: partial(call_by, contestant) for name, contestant in contestants.items()}
        await findings.rate(what, sides, callers=CALLERS, rounds=settings.rounds, round_s=settings.round_s)


async def starting(backend: SandboxBackend, spec: SandboxSpec) -> Callable[[], Awaitable[None]]:
    """Start a sandbox and wait for its agent; return the function that stops it."""
    return (await backend.start(spec)).stop


async def starting_and_using(backend: SandboxBackend, spec: SandboxSpec) -> Callable[[], Awaitable[None]]:
    """Start a sandbox and run a first program in it; return the function that stops it."""
    sandbox = await backend.start(spec)
    await Own(sandbox).execute(*BASH)
    return sandbox.stop


async def reading(contestant: Contestant) -> None:
    content = await contestant.read()
    assert content == MIB, f"{len(content)} bytes"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--image", default="envkit/base:bookworm", help="image of all containers")
    arguments.add_argument("--rock", metavar="URL", help="a running ROCK server; by default, one is started")
    arguments.add_argument("--only", choices=["local", "docker"], help="measure only this backend")
    arguments.add_argument("--starts", type=int, default=40, help="number of starts per contestant")
    arguments.add_argument("--calls", type=int, default=200, help="number of single calls per contestant")
    arguments.add_argument("--rounds", type=int, default=5, help="rounds of which the median counts")
    arguments.add_argument("--round-s", type=float, default=2, help="seconds per round with 16 callers")
    settings = parsed(arguments, starts=1, calls=5, rounds=1, round_s=0.2)
    findings = Findings()
    print(f"{len(os.sched_getaffinity(0))} processors, load average before: {os.getloadavg()[0]:.1f}")
    if settings.only != "docker":
        print("Sandboxes of bubblewrap")
        clock.run(bubblewrap, findings, settings)
    if settings.only != "local":
        print("Sandboxes of Docker")
        clock.run(containers, findings, settings)
    print(f"Load average after: {os.getloadavg()[0]:.1f}")
    claims = [claim for claim in CLAIMS if not settings.only or settings.only in claim.ours]
    findings.check(claims, is_strict=not settings.quick)


if __name__ == "__main__":
    main()
