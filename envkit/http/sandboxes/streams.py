"""Byte streams into sandboxes: each is a WebSocket of its own, at ``.../program`` or ``.../connect?to=ADDRESS``.

``program`` runs a program with streamed input and output. The client first sends a `ProgramBody` as text. Then it sends
input as binary messages, and a `ProgramInput` as text for the end of input or for a new size of the terminal. The
server sends output as binary messages, whose first byte is 1 for standard output and 2 for standard error.

``connect`` connects to a socket or a port in the sandbox. Binary messages in both directions are the bytes of the
stream. An empty binary message ends the client's direction.

At the end, the server sends a `StreamEnd` as text and closes the socket. If the client disconnects, the program or
connection ends.
"""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import suppress

import anyio
import msgspec
from anyio.abc import TaskGroup

from envkit.errors import EnvkitError, RequestError, UnsupportedError
from envkit.http.auth.caller import Caller, caller_of
from envkit.http.protocol import sandbox_messages as wire
from envkit.http.protocol.asgi import Receive, Scope, Send
from envkit.http.protocol.bytes_encoding import decode_arguments
from envkit.http.protocol.messages import Problem, read, write
from envkit.http.sandboxes.http import query_of
from envkit.http.sandboxes.lookup import SandboxLookup
from envkit.protocols import InteractiveSandbox, Program, Sandbox

STREAM_PATHS = re.compile(re.escape(wire.BEFORE_ID) + "[^/]+/(program|connect)")

_PROGRAM = msgspec.json.Decoder(wire.ProgramBody)
_INPUT = msgspec.json.Decoder(wire.ProgramInput)
CHANNELS = {"out": b"\x01", "err": b"\x02"}
"""The first byte of a message with output, by stream."""

_PIECE_BYTES = 1 << 16
_RENEW_S = 20.0


class SandboxStreams:
    """Serves the byte streams.

    Args:
        access: Finds sandboxes.
    """

    def __init__(self, access: SandboxLookup) -> None:
        self._access = access

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket to its end."""
        await receive()
        await send({"type": "websocket.accept"})
        end: wire.StreamEnd | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._access.cancel_when_closing, tasks.cancel_scope)
                end = await self._run(scope, receive, send, tasks)
                tasks.cancel_scope.cancel()
        except* (_DisconnectedError, OSError):
            pass
        with suppress(OSError):  # the client has disconnected
            if end is not None:
                await send({"type": "websocket.send", "text": write(end).decode()})
            await send({"type": "websocket.close"})

    async def _run(self, scope: Scope, receive: Receive, send: Send, tasks: TaskGroup) -> wire.StreamEnd:
        id, _, kind = scope["path"].removeprefix(wire.BEFORE_ID).partition("/")
        caller = caller_of(scope)
        try:
            sandbox = self._access.find(id, caller)
            tasks.start_soon(self._renew, id, caller)
            with self._access.with_caller_ids(id, caller):
                if kind == "program":
                    return wire.StreamEnd(await self._program(sandbox, receive, send, tasks))
                await _connection(sandbox, query_of(scope).get("to", ""), receive, send, tasks)
                return wire.StreamEnd()
        except (_DisconnectedError, OSError):
            raise
        except Exception as error:
            return wire.StreamEnd(error=msgspec.json.decode(self._access.failure(error).body, type=Problem))

    async def _renew(self, id: str, caller: Caller) -> None:
        """Prevent the sandbox from expiring while the stream is open."""
        while True:
            await anyio.sleep(_RENEW_S)
            with suppress(EnvkitError):
                self._access.find(id, caller)

    async def _program(self, sandbox: Sandbox, receive: Receive, send: Send, tasks: TaskGroup) -> wire.ExecReply:
        if not isinstance(sandbox, InteractiveSandbox):
            raise UnsupportedError(f"sandbox {sandbox.id} does not support interactive programs")
        first = await _next(receive)
        body = read(first if isinstance(first, bytes) else first.encode(), _PROGRAM)
        self._access.check_timeout(body.timeout_s)
        async with sandbox.program(
            decode_arguments(body.argv),
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
    """Copy bytes between the client and a socket in the sandbox, until the socket ends."""
    if not address:
        raise RequestError("to: must be the name of a socket or a port number")
    loop = asyncio.get_running_loop()
    with await sandbox.connect(int(address) if address.isascii() and address.isdigit() else address) as stream:
        stream.setblocking(False)

        async def send_input() -> None:
            while content := await _next(receive):
                await loop.sock_sendall(stream, content if isinstance(content, bytes) else content.encode())
            stream.shutdown(socket.SHUT_WR)
            await _next(receive)

        tasks.start_soon(send_input)
        while piece := await loop.sock_recv(stream, _PIECE_BYTES):
            await send({"type": "websocket.send", "bytes": piece})


async def _send_input(program: Program, receive: Receive) -> None:
    """Send the client's messages to a program."""
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
    """Return the client's next message.

    Raises:
        _DisconnectedError: The client has disconnected.
    """
    message = await receive()
    if message["type"] != "websocket.receive":
        raise _DisconnectedError
    content: str | bytes | None = message.get("text")
    return message.get("bytes") or b"" if content is None else content
