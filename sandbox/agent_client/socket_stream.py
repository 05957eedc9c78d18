"""A byte stream over a connected socket: the streams of asyncio, with the errors that a channel expects."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

_READ_BYTES = 256 << 10
_FULL_BYTES = 1 << 20
"""Limit of buffered bytes per direction, at which `send` waits and reading from the socket pauses."""


class SocketStream:
    """A buffered byte stream over a socket; implements `envkit.sandbox.agent_client.channel.Stream`.

    Use `open` to create one.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connected: socket.socket) -> SocketStream:
        """Return a stream over a connected stream socket, which the stream makes non-blocking and closes."""
        connected.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connected, limit=_FULL_BYTES // 2)
        writer.transport.set_write_buffer_limits(_FULL_BYTES)
        return cls(reader, writer)

    async def send(self, data: bytes) -> None:
        """Send all of `data`; see `envkit.sandbox.agent_client.channel.Stream.send`."""
        if self._writer.is_closing():
            raise ConnectionError("the stream is closed")
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Wait for data and return it; return empty bytes at the end of the stream."""
        try:
            return await self._reader.read(_READ_BYTES)
        except OSError:
            return b""

    async def end(self) -> None:
        """Wait until all data is sent, then shut down the write side.

        Raises:
            ConnectionError: The other side is gone.
        """
        self._writer.transport.set_write_buffer_limits(0)
        await self._writer.drain()
        with suppress(OSError):
            self._writer.write_eof()

    def close(self) -> None:
        """Close the stream without waiting for unsent data; a repeated call does nothing."""
        self._writer.transport.abort()
