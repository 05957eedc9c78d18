"""Raw connections to a Docker daemon for the standard streams of a container.

The daemon prefixes each chunk of output with 8 bytes: 1 for standard output or 2 for standard error, three zeros, and
the chunk's length, big-endian. A read may return only a part of such a frame.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from contextlib import suppress
from typing import TypeAlias

from envkit import clock

from ..agent_client.socket_stream import SocketStream

Address: TypeAlias = str | tuple[str, int]
"""Address of a daemon: the path of a Unix socket, or a host and a port."""

_HEADER_BYTES = 8
_STDOUT, _STDERR = 1, 2
_KEPT_STDERR_BYTES = 64 << 10
_MAX_HEAD_BYTES = 64 << 10
_CONNECT_S = 10.0


class AttachStream:
    """The standard streams of a container; implements `envkit.sandbox.agent_client.channel.Stream`. See `attach`.

    Args:
        stream: Connection to the daemon over which it sends and receives the container's streams.
        received: Bytes of the streams that have already been received.
    """

    def __init__(self, stream: SocketStream, received: bytes) -> None:
        self._stream = stream
        self._received = bytearray(received)
        self._stderr = bytearray()

    async def send(self, data: bytes) -> None:
        """Write `data` to standard input; see `envkit.sandbox.agent_client.channel.Stream.send`."""
        await self._stream.send(data)

    async def receive(self) -> bytes:
        """Wait for standard output and return it; empty at the end of the output."""
        while not (output := self._take_output()):
            if not (data := await self._stream.receive()):
                return b""
            length = len(data) - _HEADER_BYTES
            if length > 0 and not self._received and data[0] == _STDOUT and int.from_bytes(data[4:8], "big") == length:
                return data[_HEADER_BYTES:]  # the usual case: one whole frame of standard output
            self._received += data
        return output

    async def last_stderr(self) -> bytes:
        """Wait for the end of the output, and return the last 64 KiB that were written to standard error."""
        while await self.receive():
            pass
        return bytes(self._stderr)

    def close(self) -> None:
        """Close the connection immediately; may be called repeatedly. Output received before can still be read."""
        self._stream.close()

    def _take_output(self) -> bytes:
        """Remove all complete frames from the received bytes. Return their standard output; keep their stderr."""
        output = bytearray()
        start, end = 0, len(self._received)
        with memoryview(self._received) as view:
            while end - start >= _HEADER_BYTES:
                length = int.from_bytes(view[start + 4 : start + _HEADER_BYTES], "big")
                if end - start - _HEADER_BYTES < length:
                    break
                into = self._stderr if view[start] == _STDERR else output
                into += view[start + _HEADER_BYTES : start + _HEADER_BYTES + length]
                start += _HEADER_BYTES + length
        del self._received[:start]
        del self._stderr[:-_KEPT_STDERR_BYTES]
        return bytes(output)


async def attach(address: Address, path: str) -> AttachStream:
    """Send ``POST path`` to the daemon at `address`, and return the streams that the daemon opens.

    Raises:
        ConnectionError: The daemon does not answer, or refuses the request; the message says why.
    """
    try:
        stream = await SocketStream.open(await clock.to_thread(connected, address, _CONNECT_S))
    except OSError as error:
        raise ConnectionError(f"the Docker daemon does not answer: {error.strerror or error}") from None
    headers = "Host: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
    try:
        await stream.send(f"POST {path} HTTP/1.1\r\n{headers}".encode())
        return AttachStream(stream, await _granted(stream))
    except BaseException:
        stream.close()
        raise


def connected(address: Address, timeout_s: float) -> socket.socket:
    """Return a blocking socket that is connected to the daemon at `address`; raises `OSError`."""
    if not isinstance(address, str):
        return socket.create_connection(address, timeout_s)
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.settimeout(timeout_s)
        stream.connect(address)
    except BaseException:
        stream.close()
        raise
    return stream


async def _granted(stream: SocketStream) -> bytes:
    """Receive the head of the daemon's response, and return the bytes after the head.

    Raises:
        ConnectionError: The daemon refused the request, or closed the connection.
    """
    head, rest = b"", b""
    received = b""
    while data := await stream.receive():
        received += data
        head, end, rest = received.partition(b"\r\n\r\n")
        if end and head.split(b" ", 2)[1:2] in ([b"101"], [b"200"]):
            return rest
        if (end and len(rest) >= _content_length(head)) or len(received) > _MAX_HEAD_BYTES:
            break
    raise ConnectionError(_refusal(head, rest))


def _content_length(head: bytes) -> int:
    """Return the length of the response body; `sys.maxsize` if the response has no Content-Length."""
    found = re.search(rb"\r\ncontent-length: *(\d+)", head.lower())
    return int(found[1]) if found else sys.maxsize


def _refusal(head: bytes, body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    with suppress(ValueError, TypeError, KeyError):
        text = str(json.loads(text)["message"])
    return text or head.split(b"\r\n", 1)[0].decode(errors="replace") or "the Docker daemon closed the connection"
