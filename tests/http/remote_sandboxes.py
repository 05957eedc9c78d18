"""Runners for tests of remote sandboxes: scripted or bubblewrap ones behind a server on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self, TypeAlias

import anyio
import httpx

from envkit import clock
from envkit.http.client.sandbox_client import SandboxClient
from envkit.protocols import SandboxBackend
from envkit.sandbox.pool import Pool
from envkit.sandbox.transfer import tar_stream
from envkit.types import ExecResult
from tests.http.envs import serving, slots
from tests.http.pools import pool_of
from tests.sandbox.fake.backend import Command, FakeBackend, Fate

A = "/v1/sandboxes/a"


def run(*argv: object, **more: Any) -> dict[str, Any]:
    """Return the body of a request that runs a program."""
    return {"argv": argv, "timeout_s": 5, **more}


def answer(command: Command) -> ExecResult:
    """Echo the command; ``sleep 5`` takes 5 s, ``count`` prints its number of runs, ``bytes`` prints odd bytes.

    ``say 100 \x07`` prints that 100 times.
    """
    first, *rest = command.argv if command.shell is None else command.argv[2].split()
    if first == "sleep":
        return ExecResult(0, duration_s=float(rest[0]))
    if first == "count":
        runs = int(command.files.get("/runs", b"0")) + 1
        command.files["/runs"] = b"%d" % runs
        return ExecResult(0, b"%d" % runs, duration_s=float(rest[0]) if rest else 0.0)
    if first == "say":
        return ExecResult(0, rest[1].encode() * int(rest[0]))
    if first == "bytes":
        return ExecResult(3, b"text \xe2\x98\x83", b"\xff\x00", truncated_bytes=0, is_out_of_memory=True)
    return ExecResult(0, " ".join((first, *rest)).encode(errors="surrogateescape") + command.stdin)


def scripted(**fate: Any) -> FakeBackend:
    return FakeBackend(lambda number, rng: replace(Fate(answer=answer), **fate))


OverHttp: TypeAlias = Callable[[httpx.AsyncClient, Pool], Awaitable[None]]
ByClient: TypeAlias = Callable[[SandboxClient, Pool], Awaitable[None]]


def over_http(main: OverHttp, backend: SandboxBackend | None = None, **settings: Any) -> None:
    """Run `main` with an HTTP client of a server for sandboxes of `backend`; default: scripted ones."""

    async def work(address: str, pool: Pool) -> None:
        async with httpx.AsyncClient(base_url=address, trust_env=False, verify=False, timeout=20) as client:
            await main(client, pool)

    clock.run(_run, work, backend, settings)


def by_client(main: ByClient, backend: SandboxBackend | None = None, **settings: Any) -> None:
    """Run `main` with a `SandboxClient` of such a server."""

    async def work(address: str, pool: Pool) -> None:
        async with SandboxClient(address, folder_transport=tar_stream) as client:
            await main(client, pool)

    clock.run(_run, work, backend, settings)


async def _run(
    work: Callable[[str, Pool], Awaitable[None]], backend: SandboxBackend | None, settings: dict[str, Any]
) -> None:
    sandboxes: Any = backend or scripted()
    with anyio.fail_after(40):
        async with (
            sandboxes,
            slots() as host,
            pool_of(sandboxes) as pool,
            serving(host, pool=pool, folder_transport=tar_stream, **settings) as address,
        ):
            await work(address, pool)


class Relay:
    """A TCP relay between a client and a server that can break its connections."""

    def __init__(self, address: str) -> None:
        self._target = address.removeprefix("http://").split(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await self._server.wait_closed()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def close(self) -> None:
        self._server.close()
        self.cut()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._target[0], int(self._target[1]))
        self._writers += [writer, far_writer]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_pump, reader, far_writer)
            tasks.start_soon(_pump, far_reader, writer)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    writer.transport.abort()
