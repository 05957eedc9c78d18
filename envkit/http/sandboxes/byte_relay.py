"""Bytes between a client and a server in a sandbox over a plain TCP connection, which was an HTTP request before.

A gateway plays environments on its nodes this way, since the framing of a WebSocket costs 0.4 ms in each step. The
client sends ``GET .../connect?to=ADDRESS`` with ``Upgrade: envkit-bytes``. After the status 101, all bytes are those of
the connection, in both directions.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

Take: TypeAlias = Callable[[asyncio.Protocol], asyncio.Transport]
"""Gives the connection of an HTTP request to another protocol, and returns its transport."""

EXTENSION = "envkit.bytes"
"""Key of the ASGI extension of servers that can do this; its value has the key ``take``, with a `Take`."""

UPGRADE = "envkit-bytes"
SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: envkit-bytes\r\n\r\n"


def taker(scope: Mapping[str, Any]) -> Take | None:
    """Return how to take over the connection of a request that asks for it; None if it does not, or cannot be."""
    if (b"upgrade", UPGRADE.encode()) not in scope["headers"]:
        return None
    take: Take | None = scope.get("extensions", {}).get(EXTENSION, {}).get("take")
    return take


class _End(asyncio.Protocol):
    """One of the two connections. What arrives here is sent over the other."""

    other: _End
    transport: asyncio.Transport

    def __init__(self) -> None:
        self.has_ended = False
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # that of uvloop is no subclass

    def data_received(self, data: bytes) -> None:
        self.other.transport.write(data)

    def eof_received(self) -> bool:
        self.has_ended = True
        if self.other.transport.can_write_eof():
            self.other.transport.write_eof()
        return not self.other.has_ended  # whether to keep this connection open for the other direction

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()
        self.other.transport.close()


async def relay_bytes(stream: socket.socket, take: Take) -> None:
    """Copy bytes between `stream` and the connection that `take` gives, until both have ended. Close both."""
    client, sandbox = _End(), _End()
    client.other, sandbox.other = sandbox, client
    await asyncio.get_running_loop().create_connection(lambda: sandbox, sock=stream)
    try:
        client.transport = take(client)
        client.transport.write(SWITCHING)  # until then, the client sends nothing
        await client.lost.wait()
    finally:
        sandbox.transport.close()
