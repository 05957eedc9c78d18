"""What the tests of the proxy share: one server that is the whole internet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from envkit.sandbox.egress.allowlist import Address, Resolve

TIMEOUT_S = 20


@asynccontextmanager
async def web_server() -> AsyncIterator[Resolve]:
    """A server of the internet: give what finds it under every name. It answers with what it was asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = 1 << 22 if b"/large" in head else len(head)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + head.ljust(length, b"."))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]

    async def resolve(host: str, asked_port: int) -> Sequence[Address]:
        return [("127.0.0.1", port)]

    try:
        yield resolve
    finally:
        server.close()
        await server.wait_closed()
