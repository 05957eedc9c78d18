"""Raw asyncio connections to a Docker daemon for the standard streams of a container, or of a command inside it.

The daemon prefixes each chunk of output with 8 bytes: 1 for standard output or 2 for standard error, three zeros, and
the chunk's length, big-endian. A read may return only a part of such a frame.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TypeAlias, cast

import anyio

from envkit.types import JSON

Address: TypeAlias = str | tuple[str, int]
"""Address of a daemon: the path of a Unix socket, or a host and a port."""

_HEADER_BYTES = 8
_STDERR = 2
_FULL_BYTES = 1 << 20
"""Reading from the daemon pauses while more than this much output is unread."""
_KEPT_STDERR_BYTES = 64 << 10
_MAX_BATCH_BYTES = 32 << 10
"""Size of batched input from which it is written immediately instead of at the next iteration of the event loop."""
_MAX_HEAD_BYTES = 64 << 10


class AttachStream(asyncio.Protocol):
    """The standard streams of a container; implements `envkit.sandbox.agent_client.channel.Stream`. See `attach`.

    Args:
        keep_stderr_bytes: Maximum size of `stderr`; earlier bytes are dropped.

    Attributes:
        stderr_cut: Number of bytes of standard error that were dropped.
    """

    def __init__(self, keep_stderr_bytes: int = _KEPT_STDERR_BYTES) -> None:
        self.stderr_cut = 0
        self._keep_stderr_bytes = keep_stderr_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._head: bytearray | None = bytearray()
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self._pieces = bytearray()
        self._input = bytearray()
        self._output = bytearray()
        self._stderr = bytearray()
        self._wanted: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._is_reading = True
        self._end = anyio.Event()

    @property
    def stderr(self) -> bytes:
        """The last bytes that were written to standard error."""
        return bytes(self._stderr)

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended; `receive` may still return earlier output."""
        return self._end.is_set()

    async def ended(self) -> None:
        """Return once the connection has ended."""
        await self._end.wait()

    async def send(self, data: bytes) -> None:
        """Write `data` to standard input; return when the connection can take more.

        All data sent in one iteration of the event loop is written together, because writes are costly for the daemon.

        Raises:
            ConnectionError: The connection has ended.
        """
        if self._transport is None or self.is_over or self._transport.is_closing():
            raise ConnectionError("the connection to the container has ended")
        if not self._input:
            self._loop.call_soon(self._write)
        self._input += data
        if len(self._input) >= _MAX_BATCH_BYTES:
            self._write()
        while self._drained is not None:
            await asyncio.shield(self._drained)

    def start_sending(self, data: bytes) -> None:
        """Write `data` to standard input without waiting, for a container that does not run and read it yet."""
        if self._transport is not None:
            self._transport.write(data)

    def send_eof(self) -> None:
        """Close standard input."""
        if self._transport is not None and not self.is_over:
            self._write()
            self._transport.write_eof()

    async def receive(self) -> bytes:
        """Wait for output and return all that has arrived since the last call; empty at the end of the output."""
        while not self._output:
            if self.is_over:
                return b""
            self._wanted = self._loop.create_future()
            try:
                await self._wanted
            finally:
                self._wanted = None
        output = bytes(self._output)
        self._output.clear()
        if not self._is_reading and self._transport is not None and not self.is_over:
            self._is_reading = True
            self._transport.resume_reading()
        return output

    def close(self) -> None:
        """Close the connection immediately; may be called again."""
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, request: bytes) -> None:
        """Send the request that turns this connection into a container's streams.

        Raises:
            ConnectionError: The daemon refused the request, or closed the connection.
        """
        assert self._transport is not None
        self._transport.write(request)
        await self._answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Do not use isinstance: uvloop's transports are not subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            data = self._take_head()
        self._pieces += data
        self._take_pieces()
        if self._output and self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)
        if len(self._output) > _FULL_BYTES and self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.set()
        if not self._answered.done():
            self._take_head()
        for waiting in (self._wanted, self._drained):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        self._drained = None

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    def _write(self) -> None:
        if self._transport is not None and self._input:
            self._transport.write(self._input)
            self._input = bytearray()

    def _take_head(self) -> bytes:
        """Check the daemon's response head once it is complete, and return the bytes that follow the head."""
        head, end, rest = bytes(self._head or b"").partition(b"\r\n\r\n")
        if end and head.split(b" ", 2)[1:2] in ([b"101"], [b"200"]) and not self._answered.done():
            self._head = None
            self._answered.set_result(None)
            return rest
        is_whole = end and len(rest) >= _content_length(head)
        if (is_whole or self.is_over or len(head) > _MAX_HEAD_BYTES) and not self._answered.done():
            self._answered.set_exception(ConnectionError(_refusal(head, rest)))
            self._answered.exception()  # Read the exception, so that asyncio does not warn if the caller was cancelled.
        return b""

    def _take_pieces(self) -> None:
        start, end = 0, len(self._pieces)
        with memoryview(self._pieces) as view:
            while end - start >= _HEADER_BYTES:
                length = int.from_bytes(view[start + 4 : start + _HEADER_BYTES], "big")
                if end - start - _HEADER_BYTES < length:
                    break
                into = self._stderr if view[start] == _STDERR else self._output
                into += view[start + _HEADER_BYTES : start + _HEADER_BYTES + length]
                start += _HEADER_BYTES + length
        del self._pieces[:start]
        if (excess := len(self._stderr) - self._keep_stderr_bytes) > 0:
            del self._stderr[:excess]
            self.stderr_cut += excess


async def attach(
    address: Address, path: str, body: Mapping[str, JSON] | None = None, *, keep_stderr_bytes: int = _KEPT_STDERR_BYTES
) -> AttachStream:
    """Send ``POST path`` with `body` as JSON to the daemon at `address`, and return the streams that the daemon opens.

    Raises:
        ConnectionError: The daemon does not answer, or refuses the request; the message says why.
    """
    loop = asyncio.get_running_loop()
    made = partial(AttachStream, keep_stderr_bytes)
    try:
        if isinstance(address, str):
            _, stream = await loop.create_unix_connection(made, address)
        else:
            _, stream = await loop.create_connection(made, *address)
    except OSError as error:
        raise ConnectionError(f"the Docker daemon does not answer: {error.strerror or error}") from None
    content = b"" if body is None else json.dumps(body).encode()
    request = (
        f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    try:
        await stream.ask(request.encode() + content)
    except BaseException:
        stream.close()
        raise
    return stream


def _content_length(head: bytes) -> int:
    """Return the length of the response body; `sys.maxsize` if the response has no Content-Length."""
    found = re.search(rb"\r\ncontent-length: *(\d+)", head.lower())
    return int(found[1]) if found else sys.maxsize


def _refusal(head: bytes, body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    with suppress(ValueError, TypeError, KeyError):
        text = str(json.loads(text)["message"])
    return text or head.split(b"\r\n", 1)[0].decode(errors="replace") or "the Docker daemon closed the connection"
