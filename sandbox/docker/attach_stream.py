"""The standard streams of a container, over a raw connection to the Docker daemon.

The daemon prefixes each chunk of output with 8 bytes: 1 for standard output or 2 for standard error, three zeros, and
the chunk's length, big-endian. A read may return only a part of such a frame.
"""

from __future__ import annotations

from ..agent_client.socket_stream import SocketStream

_HEADER_BYTES = 8
_STDOUT, _STDERR = 1, 2
_KEPT_STDERR_BYTES = 64 << 10


class AttachStream:
    """The standard streams of a container; implements `envkit.sandbox.agent_client.channel.Stream`.

    `received` is what was already read from `stream`.
    """

    def __init__(self, stream: SocketStream, received: bytes = b"") -> None:
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
