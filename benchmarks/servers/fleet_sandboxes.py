"""Sandboxes over HTTP: envkit's gateway and ROCK's server, measured with the same client."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any, Protocol

import anyio
from servers.lean import Http
from servers.peers_sandboxes import (
    ROCK_ROUTES,
    MissingPeerError,
    Rock,
    docker_on_loopback,
    rock,
    rock_server,
    start_rock,
)
from servers.serving import gateway
from waiting import Call, CallBy, FailedCallError, Findings

from envkit import clock

CALLERS = 16
AT_ONCE = 8
_WARM = 4
_MEMORY_MIB = 512
_NOT_WARM_MIB = 513
"""Memory of sandboxes that must start cold, because the warm pool has none of this size."""
_CPUS = 12.0
"""CPUs of an impossible request to ROCK: more than the machine has, but below 16, since ROCK rejects more anyway."""
_ATTEMPTS = 5
"""Number of attempts to start a sandbox of ROCK. Its database rejects some of several concurrent requests."""


class Contestant(Protocol):
    """One sandbox with one shell per caller."""

    async def execute(self) -> object:
        """Run ``true``."""
        ...

    async def step(self, caller: int) -> object:
        """Run ``true`` in the shell of `caller`."""
        ...


class Envkit:
    """A sandbox of the gateway."""

    def __init__(self, connections: list[Http], name: str) -> None:
        self._connections = connections
        self._path = f"/v1/sandboxes/{name}"

    async def execute(self) -> object:
        body = b'{"argv":["true"],"timeout_s":10}'
        return _succeeded(await self._connections[0].request("POST", f"{self._path}/exec", body))

    async def step(self, caller: int) -> object:
        body, target = b'{"command":"true","timeout_s":10}', f"{self._path}/shells/{caller}"
        return _succeeded(await self._connections[caller].request("POST", target, body))


class LeanRock:
    """A sandbox of ROCK."""

    def __init__(self, connections: list[Http], sandbox_id: str) -> None:
        self._connections = connections
        self._id = sandbox_id

    async def execute(self) -> object:
        return await self._call(0, "execute", command=["true"])

    async def step(self, caller: int) -> object:
        return await self._call(caller, "run_in_session", command="true", session=str(caller), action_type="bash")

    async def _call(self, caller: int, name: str, **fields: object) -> object:
        body = json.dumps({"sandbox_id": self._id, **fields}).encode()
        answer = json.loads(await self._connections[caller].request("POST", ROCK_ROUTES + name, body))
        if answer["status"] != "Success" or answer["result"]["exit_code"] != 0:
            raise FailedCallError(str(answer))
        return None


async def sandboxes(findings: Findings, settings: argparse.Namespace) -> None:
    program = shutil.which("docker")
    if program is None:
        sys.exit("there is no docker on PATH")
    warm = json.dumps([{"count": _WARM, "image": settings.image, "memory_mib": _MEMORY_MIB}])
    keys = [f"warm={warm}", "node.memory_mib=16384", "envs.sandboxes=1", "envs.warm=0"]
    keys.append(f"envs.image={settings.games_image}")
    words = ["--backend", "docker", *(word for key in keys for word in ("--set", key))]
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(gateway(*words))
        await _starts(findings, own.url, settings)
        stack.enter_context(docker_on_loopback(program))
        contestants: dict[str, Contestant] = {}
        try:
            server = await stack.enter_async_context(rock_server())
            await _starts_of_rock(findings, server, settings)
            theirs = await stack.enter_async_context(rock(server, settings.image))
            for shell in range(CALLERS):
                await theirs.open_shell(shell)
            contestants["ROCK"] = LeanRock(await stack.enter_async_context(_connected(server)), theirs.id)
        except MissingPeerError as error:
            print(f"  left out: ROCK: {error}", flush=True)
        http = await stack.enter_async_context(_connected(own.url))
        await http[0].request("PUT", "/v1/sandboxes/place", _wanted(settings.image, _NOT_WARM_MIB))
        contestants["envkit"] = Envkit(http, "place")
        for caller in range(CALLERS):
            await contestants["envkit"].step(caller)
        await _calls(findings, contestants, settings)


async def _starts(findings: Findings, url: str, settings: argparse.Namespace) -> None:
    """Measure envkit's warm leases, cold starts and rejected requests."""
    names = count()
    http = await Http.open(url)

    async def lend() -> Callable[[], Awaitable[None]]:
        name = f"warm-{next(names)}"
        await http.request("PUT", f"/v1/sandboxes/{name}", _wanted(settings.image, _MEMORY_MIB))
        return partial(_end, http, name)

    async def refuse() -> None:
        try:
            await http.request("PUT", "/v1/sandboxes/giant", _wanted(settings.image, 1 << 20))
        except FailedCallError as error:
            if "impossible" not in str(error):
                raise
            return
        raise FailedCallError("the server accepted an impossible request")

    await _until_stocked(http)
    await findings.latency("warm lease", {"envkit": lend}, number=settings.starts, rounds=1)
    await findings.latency("impossible request", {"envkit": refuse}, number=settings.starts, rounds=1)
    async with _connected(url) as connections:

        async def start(number: int) -> str:
            name = f"cold-{next(names)}"
            await connections[number].request("PUT", f"/v1/sandboxes/{name}", _wanted(settings.image, _NOT_WARM_MIB))
            return name

        async def start_all() -> Callable[[], Awaitable[None]]:
            started = await _all_at_once(start)
            return partial(_end, http, *started)

        await findings.latency(f"{AT_ONCE} cold starts at once", {"envkit": start_all}, number=5, rounds=1)
    http.close()


async def _starts_of_rock(findings: Findings, server: str, settings: argparse.Namespace) -> None:
    """Measure starts and a rejected request of ROCK, which has no warm pool; only a few, since ROCK is slower."""
    aiohttp = import_module("aiohttp")
    async with aiohttp.ClientSession(server + ROCK_ROUTES) as http:

        async def start(number: int) -> Rock:
            for _ in range(_ATTEMPTS - 1):
                try:
                    return await start_rock(http, settings.image, cpus=0.1)
                except FailedCallError:
                    pass
            return await start_rock(http, settings.image, cpus=0.1)

        async def start_one() -> Callable[[], Awaitable[None]]:
            return (await start(0)).stop

        async def start_all() -> Callable[[], Awaitable[None]]:
            started = await _all_at_once(start)

            async def stop(number: int) -> None:
                await started[number].stop()

            return partial(_all_at_once, stop)

        await findings.latency("start, ROCK's", {"ROCK": start_one}, number=1, rounds=1)
        await findings.latency(f"{AT_ONCE} starts at once, ROCK's", {"ROCK": start_all}, number=1, rounds=1)
        begin = clock.now()
        message = f"no answer within {settings.rock_s:g} s"
        with anyio.move_on_after(settings.rock_s):
            try:
                await start_rock(http, settings.image, cpus=_CPUS)
            except FailedCallError as error:
                message = str(error)[:100]
        print(f"impossible request, ROCK's\n  ROCK {clock.now() - begin:26,.1f} s  ({message})", flush=True)


async def _calls(findings: Findings, contestants: dict[str, Contestant], settings: argparse.Namespace) -> None:
    runs: dict[str, Call] = {name: contestant.execute for name, contestant in contestants.items()}
    await findings.latency("true", runs, number=settings.calls, rounds=settings.rounds)
    steps: dict[str, Call] = {name: partial(contestant.step, 0) for name, contestant in contestants.items()}
    await findings.latency("step of a shell", steps, number=settings.calls, rounds=settings.rounds)
    many: dict[str, CallBy] = {name: contestant.step for name, contestant in contestants.items()}
    what = f"steps of {CALLERS} shells"
    await findings.rate(what, many, callers=CALLERS, rounds=settings.rounds, round_s=settings.round_s)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[list[Http]]:
    connections = [await Http.open(url) for _ in range(CALLERS)]
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


async def _end(http: Http, *names: str) -> None:
    """Stop sandboxes, and wait until the warm pool is full again."""
    for name in names:
        await http.request("DELETE", f"/v1/sandboxes/{name}")
    await _until_stocked(http)


async def _until_stocked(http: Http) -> None:
    while f"envkit_sandboxes_warm {_WARM}.0".encode() not in await http.request("GET", "/metrics"):  # noqa: ASYNC110
        await anyio.sleep(0.1)


async def _all_at_once(do: Callable[[int], Awaitable[Any]]) -> list[Any]:
    done: list[Any] = [None] * AT_ONCE

    async def one(number: int) -> None:
        done[number] = await do(number)

    async with anyio.create_task_group() as tasks:
        for number in range(AT_ONCE):
            tasks.start_soon(one, number)
    return done


def _wanted(image: str, memory_mib: int) -> bytes:
    return json.dumps({"image": image, "memory_mib": memory_mib}).encode()


def _succeeded(answer: bytes) -> None:
    if b'"exit_code":0,' not in answer:
        raise FailedCallError(answer.decode(errors="replace"))
