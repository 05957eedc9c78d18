"""HTTP and WebSocket clients of minimal cost, so that a measurement shows the server's cost.

They make one call at a time, and support only the part of the protocols that these servers need: HTTP/1.1 replies with
a Content-Length, and WebSocket frames without fragmentation.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Self, cast
from urllib.parse import urlsplit

from waiting import FailedCallError

_KEY = base64.b64encode(bytes(16)).decode()
_NO_MASK = bytes(4)
"""A client must mask the frames that it sends. A mask of zeros does not change the content."""
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10


class Connection(asyncio.Protocol):
    """A persistent connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._came = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self._is_over = False

    @classmethod
    async def open(cls, url: str) -> Self:
        place = urlsplit(url)
        _, connection = await asyncio.get_running_loop().create_connection(cls, place.hostname, place.port)
        return connection

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass

    def data_received(self, data: bytes) -> None:
        self._came += data
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the connection ended: {exc}"))

    async def _ask(self, data: bytes) -> bytes:
        if self._is_over:
            raise ConnectionError("the connection has ended")
        self._answer = asyncio.get_running_loop().create_future()
        if data:
            self._transport.write(data)
        else:
            self._look()
        return await self._answer

    def _look(self) -> None:
        """Resolve the pending call if its reply is complete."""
        raise NotImplementedError


class Http(Connection):
    """Requests over one connection."""

    async def request(self, verb: str, target: str, body: bytes = b"") -> bytes:
        """Send a request and return the body of the reply.

        Raises:
            FailedCallError: The reply is an error.
        """
        fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        head = f"{verb} {target} HTTP/1.1\r\n{fields}"
        answer = await self._ask(b"%b\r\n\r\n%b" % (head.encode(), body))
        head, _, content = answer.partition(b"\r\n\r\n")
        if head[9:10] != b"2":
            raise FailedCallError(answer.decode())
        return content

    def _look(self) -> None:
        end = self._came.find(b"\r\n\r\n") + 4
        if end < 4 or self._answer is None or self._answer.done():
            return
        head = bytes(self._came[:end]).lower()
        length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
        end += int(length)
        if len(self._came) >= end:
            self._answer.set_result(bytes(self._came[:end]))
            del self._came[:end]


class WebSocket(Connection):
    """Messages over one WebSocket; each message has one reply."""

    _is_open = False

    @classmethod
    async def open_at(cls, url: str, path: str) -> Self:
        socket = await cls.open(url)
        upgrade = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {_KEY}"
        answer = await socket._ask(f"GET {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n{upgrade}\r\n\r\n".encode())
        if not answer.startswith(b"HTTP/1.1 101"):
            raise FailedCallError(answer.decode())
        return socket

    async def call(self, message: bytes) -> bytes:
        """Send a message and return the next message received."""
        return await self._ask(_frame(_TEXT, message))

    async def more(self) -> bytes:
        """Return the next message received, without sending one."""
        return await self._ask(b"")

    def _look(self) -> None:
        if not self._is_open:
            end = self._came.find(b"\r\n\r\n") + 4
            if end >= 4:
                self._is_open = True
                self._give(end, 0)
            return
        while len(self._came) >= 2:
            kind, size, begin = self._came[0] & 15, self._came[1] & 127, 2
            if size >= 126:
                begin, form = (4, ">H") if size == 126 else (10, ">Q")
                if len(self._came) < begin:
                    return
                size = struct.unpack_from(form, self._came, 2)[0]
            if len(self._came) < begin + size:
                return
            if kind in (_TEXT, _BINARY):
                if self._answer is None or self._answer.done():  # keep the message for the next call
                    return
                self._give(begin + size, begin)
                continue
            if kind == _PING:
                self._transport.write(_frame(_PONG, bytes(self._came[begin : begin + size])))
            elif kind == _CLOSE:
                self._transport.close()
            del self._came[: begin + size]

    def _give(self, end: int, begin: int) -> None:
        assert self._answer is not None
        self._answer.set_result(bytes(self._came[begin:end]))
        del self._came[:end]


def _frame(kind: int, content: bytes) -> bytes:
    size = len(content)
    if size < 126:
        head = bytes((128 | kind, 128 | size))
    elif size < 1 << 16:
        head = struct.pack(">BBH", 128 | kind, 128 | 126, size)
    else:
        head = struct.pack(">BBQ", 128 | kind, 128 | 127, size)
    return b"%b%b%b" % (head, _NO_MASK, content)
