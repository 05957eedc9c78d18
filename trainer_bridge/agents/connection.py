"""One HTTP request of a client, and the response to it, over ASGI."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import msgspec

from .dialect import sse

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 32 << 20
"""Maximum size of a body, also after decompression."""


class HttpError(Exception):
    """A request that gets an error.

    Attributes:
        code: The error in one word, for programs.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ClientGoneError(Exception):
    """The client has closed the connection."""


class Connection:
    """A request and its response.

    Attributes:
        headers: Headers of the request; names in lower case. Of those that are repeated, the last one.
        has_started: Whether the status of the response has been sent.
    """

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.has_started = False
        self._receive = receive
        self._send = send

    async def body(self) -> bytes:
        """Receive the body, and decompress it.

        Raises:
            HttpError: It is too large, or compressed in another way than with gzip.
            ClientGoneError: The client has gone before its end.
        """
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip"):
            raise HttpError(
                415, "unsupported_encoding", f"the content encoding {encoding} is not supported; use gzip or none"
            )
        received, has_more = bytearray(), True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            received += message.get("body", b"")
            has_more = message.get("more_body", False)
            _check_size(received)
        return bytes(received) if encoding == "identity" else _decompressed(received)

    async def closed(self, scope: anyio.CancelScope) -> None:
        """Cancel `scope` when the client closes the connection. Call this after `body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def respond(self, status: int, body: object, *, is_last: bool = True) -> None:
        """Send a response in JSON. If it is not the last part, `end` has to follow."""
        content = msgspec.json.encode(body)
        await self._start(status, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))])
        await self._write(b"" if self.method == "HEAD" else content, is_last=is_last)

    async def fail(self, status: int, body: object) -> None:
        """Send an error: a response of its own, or the last event of a stream that has begun."""
        if not self.has_started:
            await self.respond(status, body)
            return
        await self.stream(sse(body, "error"))
        await self.end()

    async def stream(self, data: bytes) -> None:
        """Send a part of a stream of events. The first part also sends the status."""
        if not self.has_started:
            await self._start(200, [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")])
        await self._write(data, is_last=False)

    async def end(self) -> None:
        """End a response that was sent in parts."""
        await self._write(b"", is_last=True)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_started = True
        await self._send_message({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, *, is_last: bool) -> None:
        await self._send_message({"type": "http.response.body", "body": data, "more_body": not is_last})
        if not is_last:
            await anyio.lowlevel.checkpoint()  # `closed` runs here if the client has gone while the data was sent

    async def _send_message(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:
            raise ClientGoneError from None


def _decompressed(body: bytes | bytearray) -> bytes:
    reader = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = reader.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise HttpError(400, "invalid_request", f"the body is not compressed with gzip: {error}") from None
    _check_size(content)
    if not reader.eof:
        raise HttpError(400, "invalid_request", "the compressed body is cut off")
    return content


def _check_size(body: bytes | bytearray) -> None:
    if len(body) > MAX_BODY_BYTES:
        raise HttpError(413, "request_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
