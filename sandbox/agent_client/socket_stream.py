"""A byte stream over a connected socket, driven by callbacks of the asyncio event loop."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from contextlib import suppress

_READ_BYTES = 256 << 10
_FULL_BYTES = 1 << 20
"""Limit of buffered bytes per direction, at which `send` waits and reading from the socket pauses."""


class SocketStream:
    """A buffered byte stream over a socket; implements `envkit.sandbox.agent_client.channel.Stream`.

    Args:
        connected: A connected stream socket. The stream makes it non-blocking and closes it.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._input: deque[bytes] = deque()
        self._input_bytes = 0
        self._data_waiter: asyncio.Future[None] | None = None
        self._output = bytearray()
        self._drained: asyncio.Future[None] | None = None
        self._waits_for_room = False
        self._is_reading = True
        self._is_at_end = False
        self._is_closed = False
        self._why = "the stream is closed"
        self._loop.add_reader(connected, self._on_readable)

    async def send(self, data: bytes) -> None:
        """Send all of `data`; see `envkit.sandbox.agent_client.channel.Stream.send`.

        The data of all calls within one iteration of the event loop is sent together.
        """
        self._require_open()
        if not self._output:
            self._loop.call_soon(self._send_some)
        self._output += data
        await self._wait_until_left(_FULL_BYTES)

    async def receive(self) -> bytes:
        """Wait for data and return it; return empty bytes at the end of the stream."""
        while not self._input:
            if self._is_at_end:
                return b""
            self._data_waiter = self._loop.create_future()
            await self._data_waiter
        data = self._input.popleft()
        self._input_bytes -= len(data)
        if not self._is_reading and not self._is_at_end and self._input_bytes < _FULL_BYTES // 2:
            self._is_reading = True
            self._loop.add_reader(self._socket, self._on_readable)
        return data

    async def end(self) -> None:
        """Wait until all data is sent, then shut down the write side.

        Raises:
            ConnectionError: The other side is gone.
        """
        await self._wait_until_left(0)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the stream without waiting for unsent data; a repeated call does nothing."""
        if self._is_closed:
            return
        if self._output and not self._waits_for_room:
            # Try to send data that was queued in this iteration of the event loop, for which `_send_some` has not run.
            with suppress(OSError):
                self._write(self._output)
        self._is_closed = self._is_at_end = True
        self._output.clear()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._wake(self._data_waiter)
        self._wake_senders()

    async def _wait_until_left(self, count: int) -> None:
        """Wait until at most `count` bytes are unsent. Raises `ConnectionError` if the stream is closed."""
        while len(self._output) > count:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)
        self._require_open()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConnectionError(self._why)

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except ConnectionError:
            raise
        except OSError as error:  # such as a lost route
            raise ConnectionError(error.strerror or str(error)) from None

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._input.append(data)
            self._input_bytes += len(data)
        else:
            self._is_at_end = True
        if not data or self._input_bytes >= _FULL_BYTES:
            self._is_reading = False
            self._loop.remove_reader(self._socket)
        self._wake(self._data_waiter)

    def _send_some(self) -> None:
        """Send as much as possible now, and the rest when the socket becomes writable."""
        if self._is_closed:
            return
        try:
            del self._output[: self._write(self._output)]
        except OSError as error:
            self._why = str(error)
            self.close()
            return
        if len(self._output) <= _FULL_BYTES // 2:
            self._wake_senders()
        if bool(self._output) is not self._waits_for_room:
            self._waits_for_room = bool(self._output)
            if self._waits_for_room:
                self._loop.add_writer(self._socket, self._send_some)
            else:
                self._loop.remove_writer(self._socket)

    def _wake_senders(self) -> None:
        self._wake(self._drained)
        self._drained = None

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
