"""TLS handshakes that clients leave unfinished, at a real server."""

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


class Door:
    """A server that speaks TLS."""

    def __init__(self, port: int, certificate: Path) -> None:
        self.port = port
        self.certificate = certificate

    async def knock(self) -> SocketStream:
        """Return a connection that has said nothing."""
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def status(self) -> bytes:
        """Return the first line of an answer."""
        context = ssl.create_default_context(cafile=self.certificate)
        plain = await self.knock()
        wrapped = TLSStream.wrap(plain, hostname="127.0.0.1", ssl_context=context, standard_compatible=False)
        async with await wrapped as link:
            await link.send(HELLO)
            return (await link.receive()).partition(b"\r\n")[0]


def beside(pair: Pair, main: Callable[[Door], Awaitable[None]], *, most: int, fast: bool = False) -> None:
    """Run `main` beside a server, in virtual time unless that is to be as fast as a real one."""

    async def run() -> None:
        addresses: list[str] = []
        is_ready = anyio.Event()

        def on_ready(address: str) -> None:
            addresses.append(address)
            is_ready.set()

        async with slots() as host, anyio.create_task_group() as tasks:
            served = partial(serve, create_app(host), port=0, on_ready=on_ready, handle_signals=False, drain_s=1)
            tasks.start_soon(partial(served, certificate=pair.certificate, key=pair.key, max_connections=most))
            await is_ready.wait()
            await main(Door(int(addresses[0].rpartition(":")[2]), pair.certificate))
            tasks.cancel_scope.cancel()

    clock.run(run, virtual=not fast, fast=fast)


async def is_dropped(link: SocketStream) -> bool:
    try:
        await link.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return True
    return False


def test_who_connects_and_says_nothing_is_let_go_after_a_while(pair: Pair) -> None:
    async def main(door: Door) -> None:
        async with await door.knock() as silent, await door.knock() as slow:
            await slow.send(b"\x16\x03\x01")
            began = clock.now()
            for link in (silent, slow):
                assert await is_dropped(link)
            assert clock.now() - began == pytest.approx(HANDSHAKE_S, abs=0.1)

    beside(pair, main, most=20)


def test_silent_ones_count_as_connections_and_make_room_for_who_comes_later(pair: Pair) -> None:
    async def main(door: Door) -> None:
        async with AsyncExitStack() as silent:
            for _ in range(22):
                await silent.enter_async_context(await door.knock())
            async with await door.knock() as late:
                with anyio.fail_after(1):
                    assert await is_dropped(late)
            await anyio.sleep(2 * http_connection.CHECK_INTERVAL_S)
            assert await door.status() == b"HTTP/1.1 200 OK"

    beside(pair, main, most=20)


@pytest.mark.parametrize("fast", [False, True])
def test_handshakes_that_fail_are_forgotten_at_once(pair: Pair, fast: bool) -> None:
    async def leave(door: Door) -> None:
        async with await door.knock():
            pass

    async def say_no_tls(door: Door) -> None:
        async with await door.knock() as link:
            await link.send(HELLO)
            with suppress(anyio.BrokenResourceError):
                await is_dropped(link)

    async def main(door: Door) -> None:
        for _ in range(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leave, door)
                tasks.start_soon(say_no_tls, door)
                tasks.start_soon(door.status)
        assert await door.status() == b"HTTP/1.1 200 OK"

    beside(pair, main, most=5, fast=fast)
