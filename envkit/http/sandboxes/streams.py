"""Byte streams into sandboxes. Each uses a separate WebSocket, at ``.../program`` or ``.../connect?to=ADDRESS``.

``program`` runs a program with streamed input and output. The client first sends a `ProgramBody` as text. Then it sends
input as binary messages, and a `ProgramInput` as text for the end of input or for a new size of the terminal. The
server sends output as binary messages, whose first byte is 1 for standard output and 2 for standard error.

``connect`` connects to a socket or a port in the sandbox. Binary messages in both directions are the bytes of the
stream. The client sends an empty binary message when it has sent all its bytes.

When the program or connection ends, the server sends a `StreamEnd` as text and closes the WebSocket. If the client
disconnects, the server ends the program or connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from envkit.errors import EnvkitError
from envkit.http.auth.caller import Caller, caller_of
from envkit.http.protocol import operations as table
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.asgi import CallOutcome, HttpCall, Receive, Scope, Send, parameters, respond_outcome
from envkit.http.protocol.messages import Problem, read, write
from envkit.http.protocol.operations import Operation
from envkit.http.sandboxes.access import SandboxAccess
from envkit.http.sandboxes.byte_relay import Take, relay_bytes
from envkit.protocols import Program, Sandbox

_PROGRAM = msgspec.json.Decoder(wire.ProgramBody)
_INPUT = msgspec.json.Decoder(wire.ProgramInput)
CHANNELS = {"out": b"\x01", "err": b"\x02"}
"""The first byte of a binary message with output, for standard output and for standard error."""

_PIECE_BYTES = 1 << 16
_RENEW_S = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class SandboxStreams:
    """Serves the byte streams. `failure` converts an error to an outcome, as `SessionOperations.failure` does."""

    access: SandboxAccess
    failure: Callable[[Exception], CallOutcome]

    async def serve(
        self, operation: Operation[Any, Any], sandbox_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve one WebSocket to its end. `operation` is `PROGRAM` or `CONNECT`."""
        await receive()
        await send({"type": "websocket.accept"})
        end: wire.StreamEnd | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.access.cancel_when_closing, tasks.cancel_scope)
                end = await self._run(operation, sandbox_id, HttpCall(caller_of(scope), scope, receive, send), tasks)
                tasks.cancel_scope.cancel()
        except* (_DisconnectedError, OSError):
            pass
        with suppress(OSError):  # the client has disconnected
            if end is not None:
                await send({"type": "websocket.send", "text": write(end).decode()})
            await send({"type": "websocket.close"})

    async def serve_bytes(self, sandbox_id: str, take: Take, scope: Scope, send: Send) -> None:
        """Serve a connection to a server in a sandbox as plain bytes; see `envkit.http.sandboxes.byte_relay`."""
        caller = caller_of(scope)
        try:
            query = table.CONNECT.request(**parameters(table.CONNECT, {"sandbox_id": sandbox_id}, scope))
            stream = await self.access.find(sandbox_id, caller).connect(_address(query.to))
        except Exception as error:
            await respond_outcome(send, self.failure(error))
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.access.cancel_when_closing, tasks.cancel_scope)
            tasks.start_soon(self._renew, sandbox_id, caller)
            await relay_bytes(stream, take)
            tasks.cancel_scope.cancel()

    async def _run(self, operation: Operation[Any, Any], id: str, call: HttpCall, tasks: TaskGroup) -> wire.StreamEnd:
        try:
            query = operation.request(**parameters(operation, {"sandbox_id": id}, call.scope))
            sandbox = self.access.find(id, call.caller)
            tasks.start_soon(self._renew, id, call.caller)
            if operation is table.PROGRAM:
                return wire.StreamEnd(await self._program(sandbox, call.receive, call.send, tasks))
            await _connection(sandbox, query.to, call.receive, call.send, tasks)
            return wire.StreamEnd()
        except (_DisconnectedError, OSError):
            raise
        except Exception as error:
            problem = self.failure(error).body
            return wire.StreamEnd(error=msgspec.json.decode(problem, type=Problem))

    async def _renew(self, id: str, caller: Caller) -> None:
        """Prevent the sandbox from expiring while the stream is open."""
        while True:
            await anyio.sleep(_RENEW_S)
            with suppress(EnvkitError):
                self.access.find(id, caller)

    async def _program(self, sandbox: Sandbox, receive: Receive, send: Send, tasks: TaskGroup) -> wire.ExecReply:
        first = await _next(receive)
        body = read(first if isinstance(first, bytes) else first.encode(), _PROGRAM)
        self.access.check_timeout(body.timeout_s)
        async with sandbox.program(
            wire.decode_arguments(body.argv),
            timeout_s=body.timeout_s,
            env=body.env,
            cwd=body.cwd,
            user=body.user,
            terminal=body.terminal,
        ) as program:
            tasks.start_soon(_send_input, program, receive)
            while (piece := await program.receive()) is not None:
                await send({"type": "websocket.send", "bytes": CHANNELS[piece[0]] + piece[1]})
            return wire.ExecReply.of(await program.result())


class _DisconnectedError(Exception):
    """The client has disconnected."""


async def _connection(sandbox: Sandbox, address: str, receive: Receive, send: Send, tasks: TaskGroup) -> None:
    """Connect to `address` in the sandbox, and copy bytes between it and the client until the connection ends."""
    loop = asyncio.get_running_loop()
    with await sandbox.connect(_address(address)) as stream:
        stream.setblocking(False)

        async def send_input() -> None:
            while content := await _next(receive):
                await loop.sock_sendall(stream, content if isinstance(content, bytes) else content.encode())
            stream.shutdown(socket.SHUT_WR)
            await _next(receive)

        tasks.start_soon(send_input)
        while piece := await loop.sock_recv(stream, _PIECE_BYTES):
            await send({"type": "websocket.send", "bytes": piece})


def _address(text: str) -> str | int:
    """Return the port or the name of a socket that a caller wrote."""
    return int(text) if text.isascii() and text.isdigit() else text


async def _send_input(program: Program, receive: Receive) -> None:
    """Pass the client's messages on to a program: input, its end, and new sizes of the terminal."""
    while True:
        content = await _next(receive)
        if isinstance(content, bytes):
            await program.send(content)
            continue
        request = read(content.encode(), _INPUT)
        if request.rows and request.columns:
            await program.resize(request.rows, request.columns)
        if request.eof:
            await program.send_eof()


async def _next(receive: Receive) -> str | bytes:
    """Return the client's next message; raise `_DisconnectedError` if the client has disconnected."""
    message = await receive()
    if message["type"] != "websocket.receive":
        raise _DisconnectedError
    content: str | bytes | None = message.get("text")
    return message.get("bytes") or b"" if content is None else content
