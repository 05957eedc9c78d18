"""A server in virtual time for slow clients, and helpers of such clients."""

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

Connect: TypeAlias = Callable[[], Awaitable[SocketStream]]
HELLO = b"GET /v1/health HTTP/1.1\r\n\r\n"


class SizedAnswers:
    """Answers each request with the number of bytes in its path, and records the outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

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
                self.outcomes.append("left")
            else:
                await respond(send, b"x" * int(scope["path"][1:]))
                self.outcomes.append(f"{len(body)}")
        except Exception as error:
            self.outcomes.append(str(error))

    async def drain(self, timeout_s: float) -> None:
        pass


def with_server(
    main: Callable[[Connect], Awaitable[None]], app: SizedAnswers | None = None, max_connections: int | None = None
) -> None:
    """Run `main` with a server, in virtual time; only the test itself takes time."""

    async def run() -> None:
        addresses: list[str] = []
        is_ready = anyio.Event()

        def on_ready(address: str) -> None:
            addresses.append(address)
            is_ready.set()

        async def connect() -> SocketStream:
            host, port = addresses[0].removeprefix("http://").split(":")
            return await anyio.connect_tcp(host, int(port))

        async with slots() as host, FakeBackend() as backend, anyio.create_task_group() as tasks:
            served_app = app or create_app(host, pool=SmallPool(backend), folder_transport=tar_stream)
            served = partial(serve, served_app, port=0, on_ready=on_ready, handle_signals=False)
            tasks.start_soon(partial(served, drain_s=1, max_connections=max_connections))
            await is_ready.wait()
            await main(connect)
            tasks.cancel_scope.cancel()

    clock.run(run, virtual=True)


async def flood(stream: SocketStream, data: bytes) -> int:
    """Send until the server closes the connection; return the number of bytes sent."""
    count = 0
    with suppress(anyio.BrokenResourceError):
        while True:
            await stream.send(data)
            count += len(data)
    return count


async def read_to_end(stream: SocketStream) -> bytes:
    """Return all bytes until the server closes the connection."""
    received = b""
    try:
        while True:
            received += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return received


def problem(received: bytes) -> dict[str, Any]:
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json\r\n" in head
    assert b"connection: close" in head
    found: dict[str, Any] = json.loads(body)
    assert head.startswith(b"HTTP/1.1 %d " % found["status"])
    return found
