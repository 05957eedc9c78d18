"""Byte streams into sandboxes of a server; see `envkit.http.sandboxes.streams` for the protocol."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import anyio
import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from envkit.errors import EnvkitError, UnreachableError, from_problem
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.messages import write
from envkit.protocols import Program
from envkit.types import ExecResult

_END = msgspec.json.Decoder(wire.StreamEnd)
_STREAMS = {1: "out", 2: "err"}
_PIECE_BYTES = 1 << 16
_CLOSE_S = 2.0


class RemoteProgram(Program):
    """A running program in a sandbox of a server; implements `envkit.protocols.Program`."""

    def __init__(self, connection: ClientConnection, address: str) -> None:
        self._connection = connection
        self._address = address
        self._end: wire.StreamEnd | None = None

    async def receive(self) -> tuple[str, bytes] | None:
        if self._end is not None:
            return None
        try:
            message = await self._connection.recv()
        except ConnectionClosed:
            raise UnreachableError(f"{self._address} closed the connection while a program was running") from None
        if isinstance(message, bytes):
            return _STREAMS.get(message[0], "out"), message[1:]
        self._end = end_of(message)
        return None

    async def send(self, content: bytes) -> None:
        with suppress(ConnectionClosed):
            for start in range(0, len(content), _PIECE_BYTES):
                await self._connection.send(content[start : start + _PIECE_BYTES])

    async def send_eof(self) -> None:
        with suppress(ConnectionClosed):
            await self._connection.send(write(wire.ProgramInput(eof=True)).decode())

    async def resize(self, rows: int, columns: int) -> None:
        with suppress(ConnectionClosed):
            await self._connection.send(write(wire.ProgramInput(rows=rows, columns=columns)).decode())

    async def result(self) -> ExecResult:
        if self._end is None or self._end.result is None:
            raise RuntimeError("the program has not ended; call receive until it returns None")
        return self._end.result.result()


def end_of(message: str) -> wire.StreamEnd:
    """Decode the last message of a stream. If the message contains an error, raise that error."""
    end = _END.decode(message)
    if end.error is not None:
        error: EnvkitError = from_problem(msgspec.to_builtins(end.error))
        raise error
    return end


async def relay(connection: ClientConnection, stream: socket.socket) -> None:
    """Copy bytes in both directions between `connection` and `stream` until `connection` ends. Then close both."""
    loop = asyncio.get_running_loop()
    stream.setblocking(False)

    async def send_input() -> None:
        with suppress(ConnectionClosed, OSError):
            while piece := await loop.sock_recv(stream, _PIECE_BYTES):
                await connection.send(piece)
            await connection.send(b"")

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_input)
            with suppress(ConnectionClosed, OSError):
                while isinstance(message := await connection.recv(), bytes):
                    await loop.sock_sendall(stream, message)
            tasks.cancel_scope.cancel()
    finally:
        stream.close()
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await connection.close()
