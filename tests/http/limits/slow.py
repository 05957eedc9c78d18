"""A server in virtual time, in which nothing is slow but who wants to be, and ways to be that."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import anyio
from anyio.abc import SocketStream

from envkit import clock
from envkit.http.api.app import create_app
from envkit.http.protocol.asgi import Receive, Scope, Send, read_body, respond
from envkit.http.server.server import serve
from envkit.sandbox.transfer import tar_stream
from tests.http.envs import slots
from tests.http.pools import SmallPool
from tests.sandbox.fake.backend import FakeBackend

Opened: TypeAlias = Callable[[], Awaitable[SocketStream]]
HELLO = b"GET /v1/health HTTP/1.1\r\n\r\n"


class Plain:
    """Answers each request with as many bytes as its path says, and notes what becomes of it."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for what in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{what}.complete"})
            return
        try:
            body = await read_body(scope, receive, 1 << 20)
            if scope["path"] == "/wait":
                while (await receive())["type"] != "http.disconnect":
                    pass
                self.said.append("left")
            else:
                await respond(send, b"x" * int(scope["path"][1:]))
                self.said.append(f"{len(body)}")
        except Exception as error:
            self.said.append(str(error))

    async def drain(self, timeout_s: float) -> None:
        pass


def beside(main: Callable[[Opened], Awaitable[None]], app: Plain | None = None, most: int | None = None) -> None:
    """Run `main` beside a server, in virtual time, in which nothing is slow but who wants to be."""

    async def run() -> None:
        addresses: list[str] = []
        is_ready = anyio.Event()

        def on_ready(address: str) -> None:
            addresses.append(address)
            is_ready.set()

        async def opened() -> SocketStream:
            host, port = addresses[0].removeprefix("http://").split(":")
            return await anyio.connect_tcp(host, int(port))

        async with slots() as host, FakeBackend() as backend, anyio.create_task_group() as tasks:
            served_app = app or create_app(host, pool=SmallPool(backend), trees=tar_stream)
            served = partial(serve, served_app, port=0, on_ready=on_ready, handle_signals=False)
            tasks.start_soon(partial(served, drain_s=1, max_connections=most))
            await is_ready.wait()
            await main(opened)
            tasks.cancel_scope.cancel()

    clock.run(run, virtual=True)


async def flood(link: SocketStream, data: bytes) -> int:
    """Send for as long as it is taken, and return how many bytes were."""
    count = 0
    with suppress(anyio.BrokenResourceError):
        while True:
            await link.send(data)
            count += len(data)
    return count


async def rest_of(link: SocketStream) -> bytes:
    """Return what comes until the server closes."""
    said = b""
    try:
        while True:
            said += await link.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return said


def problem(said: bytes) -> dict[str, Any]:
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json\r\n" in head
    assert b"connection: close" in head
    found: dict[str, Any] = json.loads(body)
    assert head.startswith(b"HTTP/1.1 %d " % found["status"])
    return found
