"""Unfinished TLS handshakes on a real server."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream
from anyio.streams.tls import TLSStream

from envkit import clock
from envkit.http.api.app import create_app
from envkit.http.server import http_connection
from envkit.http.server.server import serve
from envkit.http.server.tls import HANDSHAKE_S
from tests.http.envs import slots
from tests.http.server.test_tls import Pair, make_pair

HELLO = b"GET /v1/health HTTP/1.1\r\n\r\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


class TlsServer:
    """A server that speaks TLS."""

    def __init__(self, port: int, certificate: Path) -> None:
        self.port = port
        self.certificate = certificate

    async def connect(self) -> SocketStream:
        """Return a connection on which nothing is sent yet."""
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def status(self) -> bytes:
        """Return the first line of an answer."""
        context = ssl.create_default_context(cafile=self.certificate)
        plain = await self.connect()
        wrapped = TLSStream.wrap(plain, hostname="127.0.0.1", ssl_context=context, standard_compatible=False)
        async with await wrapped as stream:
            await stream.send(HELLO)
            return (await stream.receive()).partition(b"\r\n")[0]


def with_server(
    pair: Pair, main: Callable[[TlsServer], Awaitable[None]], *, max_connections: int, fast: bool = False
) -> None:
    """Run `main` with a server, in virtual time unless `fast`, which uses the production event loop."""

    async def run() -> None:
        addresses: list[str] = []
        is_ready = anyio.Event()

        def on_ready(address: str) -> None:
            addresses.append(address)
            is_ready.set()

        async with slots() as host, anyio.create_task_group() as tasks:
            served = partial(serve, create_app(host), port=0, on_ready=on_ready, handle_signals=False, drain_s=1)
            tasks.start_soon(
                partial(served, certificate=pair.certificate, key=pair.key, max_connections=max_connections)
            )
            await is_ready.wait()
            await main(TlsServer(int(addresses[0].rpartition(":")[2]), pair.certificate))
            tasks.cancel_scope.cancel()

    clock.run(run, virtual=not fast, fast=fast)


async def is_dropped(stream: SocketStream) -> bool:
    try:
        await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return True
    return False


def test_an_unfinished_handshake_is_closed_after_its_timeout(pair: Pair) -> None:
    async def main(server: TlsServer) -> None:
        async with await server.connect() as idle, await server.connect() as slow:
            await slow.send(b"\x16\x03\x01")
            began = clock.now()
            for stream in (idle, slow):
                assert await is_dropped(stream)
            assert clock.now() - began == pytest.approx(HANDSHAKE_S, abs=0.1)

    with_server(pair, main, max_connections=20)


def test_pending_handshakes_count_as_connections_and_are_closed_when_full(pair: Pair) -> None:
    async def main(server: TlsServer) -> None:
        async with AsyncExitStack() as idle:
            for _ in range(22):
                await idle.enter_async_context(await server.connect())
            async with await server.connect() as late:
                with anyio.fail_after(1):
                    assert await is_dropped(late)
            await anyio.sleep(2 * http_connection.CHECK_INTERVAL_S)
            assert await server.status() == b"HTTP/1.1 200 OK"

    with_server(pair, main, max_connections=20)


@pytest.mark.parametrize("fast", [False, True])
def test_failed_handshakes_stop_counting_at_once(pair: Pair, fast: bool) -> None:
    async def leave(server: TlsServer) -> None:
        async with await server.connect():
            pass

    async def send_plain_http(server: TlsServer) -> None:
        async with await server.connect() as stream:
            await stream.send(HELLO)
            with suppress(anyio.BrokenResourceError):
                await is_dropped(stream)

    async def main(server: TlsServer) -> None:
        for _ in range(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leave, server)
                tasks.start_soon(send_plain_http, server)
                tasks.start_soon(server.status)
        assert await server.status() == b"HTTP/1.1 200 OK"

    with_server(pair, main, max_connections=5, fast=fast)
