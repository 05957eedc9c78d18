"""What a box costs: its start, a program in it, a step of a shell that stays, a file of 1 MiB; also 16 callers at once.

Two of envkit's kinds of box, beside SWE-ReX and ROCK. Run it with the interpreter that has the peers,
``.venv/boxes/bin/python``; a peer that is missing is left out. ``--rock URL`` takes a server of ROCK that runs
already; without it one is started. All containers run in ``--image``, which must be there, with bash and what a
Python needs beside itself (libssl, libffi); ``docker/with-base`` makes the default one.
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
from servers.peers_boxes import FILE, MissingPeerError, Place, docker_on_loopback, rock, swerex
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
    """A box of envkit, used as the peers' are."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self._shells = [box.shell(str(number)) for number in range(CALLERS)]

    async def execute(self, *argv: str) -> None:
        result = await self._box.exec(argv, timeout_s=10)
        assert result.exit_code == 0, result

    async def open_shell(self, shell: int) -> None:
        await self.step(shell)

    async def step(self, shell: int) -> None:
        result = await self._shells[shell].run("true", timeout_s=10)
        assert result.exit_code == 0, result

    async def write(self, content: bytes) -> None:
        await self._box.write(FILE, content)

    async def read(self) -> bytes:
        return await self._box.read(FILE)


async def bubblewrap(findings: Findings, told: argparse.Namespace) -> None:
    """Measure boxes of bubblewrap, by themselves."""
    name = "envkit local"
    async with LocalBackend() as backend:
        for what, start in (("start", starting), ("start and bash -c true", starting_and_using)):
            turns: dict[str, Call] = {name: partial(start, backend, SandboxSpec())}
            await findings.latency(f"{what}, idle machine", turns, number=told.starts, rounds=1)
            with busy_processors():
                await findings.latency(f"{what}, all processors busy", turns, number=told.starts, rounds=1)
        own = Own(await backend.start(SandboxSpec()))
        await own.open_shell(0)
        for what, call in (("bash -c true", partial(own.execute, *BASH)), ("step of a shell", partial(own.step, 0))):
            await findings.latency(f"{what} in bubblewrap", {name: call}, number=told.calls, rounds=1)


async def containers(findings: Findings, told: argparse.Namespace) -> None:
    """Measure containers beside the peers', which are there all the while."""
    program = shutil.which("docker")
    if program is None:
        sys.exit("there is no docker on PATH")
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(DockerBackend())
        spec = SandboxSpec(image=told.image)
        box = await backend.start(spec)
        plain = Plain(program, box.id)
        starts: dict[str, Call] = {"envkit docker": partial(starting, backend, spec), "docker run -d": plain.starting}
        await findings.latency("start of a container", starts, number=told.starts, rounds=told.starts)

        stack.enter_context(docker_on_loopback(program))
        places: dict[str, Place] = {"envkit docker": Own(box)}
        for name, peer in (("SWE-ReX", swerex(told.image)), ("ROCK", rock(told.rock, told.image))):
            try:
                places[name] = await stack.enter_async_context(peer)
            except MissingPeerError as error:
                print(f"  left out: {name}: {error}", flush=True)
        for place in places.values():
            for shell in range(CALLERS):
                await place.open_shell(shell)
        await calls(findings, places, told)


async def calls(findings: Findings, places: dict[str, Place], told: argparse.Namespace) -> None:
    one: dict[str, Callable[[Place], Awaitable[object]]] = {
        "bash -c true": lambda place: place.execute(*BASH),
        "step of a shell": lambda place: place.step(0),
        "write 1 MiB": lambda place: place.write(MIB),
        "read 1 MiB": reading,
    }
    for what, call in one.items():
        turns: dict[str, Call] = {name: partial(call, place) for name, place in places.items()}
        await findings.latency(what, turns, number=told.calls, rounds=told.rounds)
    many: dict[str, Callable[[Place, int], Awaitable[object]]] = {
        "steps of 16 shells": lambda place, caller: place.step(caller),
        "true, 16 callers": lambda place, _: place.execute("true"),
        "bash -c true, 16 callers": lambda place, _: place.execute(*BASH),
    }
    for what, call_by in many.items():
        sides: dict[str, CallBy] = {name: partial(call_by, place) for name, place in places.items()}
        await findings.rate(what, sides, callers=CALLERS, rounds=told.rounds, round_s=told.round_s)


async def starting(backend: SandboxBackend, spec: SandboxSpec) -> Callable[[], Awaitable[None]]:
    """Start a box, whose agent has answered when this returns; what stops it is returned."""
    return (await backend.start(spec)).stop


async def starting_and_using(backend: SandboxBackend, spec: SandboxSpec) -> Callable[[], Awaitable[None]]:
    """The same, and run a first program in it."""
    box = await backend.start(spec)
    await Own(box).execute(*BASH)
    return box.stop


async def reading(place: Place) -> None:
    content = await place.read()
    assert content == MIB, f"{len(content)} bytes"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--image", default="envkit/base:bookworm", help="image of all containers")
    arguments.add_argument("--rock", metavar="URL", help="a server of ROCK; without it, one is started")
    arguments.add_argument("--only", choices=["local", "docker"], help="measure this kind of box alone")
    arguments.add_argument("--starts", type=int, default=40, help="starts of each contestant")
    arguments.add_argument("--calls", type=int, default=200, help="single calls of each contestant")
    arguments.add_argument("--rounds", type=int, default=5, help="rounds of which the median counts")
    arguments.add_argument("--round-s", type=float, default=2, help="seconds of a round of 16 callers")
    told = parsed(arguments, starts=2, calls=5, rounds=1, round_s=0.2)
    findings = Findings()
    print(f"{len(os.sched_getaffinity(0))} processors, load average before: {os.getloadavg()[0]:.1f}")
    if told.only != "docker":
        print("Boxes of bubblewrap")
        clock.run(bubblewrap, findings, told)
    if told.only != "local":
        print("Boxes of Docker")
        clock.run(containers, findings, told)
    print(f"Load average after: {os.getloadavg()[0]:.1f}")
    findings.check([claim for claim in CLAIMS if not told.only or told.only in claim.ours], is_strict=not told.quick)


if __name__ == "__main__":
    main()
