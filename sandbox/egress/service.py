"""A service of this process that programs in a sandbox without a network reach at a port on 127.0.0.1.

The relay of `envkit.sandbox.egress.proxy` runs in the sandbox, and this process opens the connections to it. So the
sandbox reaches this one service and nothing else.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio

from envkit import clock
from envkit.errors import SandboxEndedError
from envkit.protocols import Sandbox

from ..agent_client.channel import SocketStream
from .proxy import connected, join, keep_relay, serve_relay

_PORTS = range(20_000, 60_000)
_START_S = 30.0
_PYTHON = "python3"


@asynccontextmanager
async def open_service(sandbox: Sandbox, connect: Callable[[], Awaitable[socket.socket]]) -> AsyncIterator[int]:
    """Let the programs of a sandbox with Python 3.8 or newer connect to a service during the block.

    `connect` returns a connected, non-blocking socket to the service.

    Yields:
        The port on 127.0.0.1 in the sandbox.

    Raises:
        SandboxEndedError: The relay does not start in the sandbox.
        SandboxLostError: The sandbox was lost.
    """

    async def answer(client: SocketStream, first: bytes) -> None:
        if not first:
            return
        with suppress(OSError):
            upstream = await SocketStream.open(await connect())
            try:
                await join(client, upstream, first)
                await client.end()
            finally:
                upstream.close()

    port = secrets.choice(_PORTS)  # a random one, because sandboxes without isolation share the ports of the machine
    name = f"service-{port}"
    async with clock.background_tasks() as tasks:
        tasks.start_soon(keep_relay, sandbox, _PYTHON, name, port)
        with anyio.move_on_after(_START_S) as scope:
            (await connected(sandbox, name)).close()
        if scope.cancelled_caught:
            raise SandboxEndedError(sandbox.id, f"the relay did not start in the sandbox; it needs {_PYTHON}")
        tasks.start_soon(serve_relay, sandbox, name, answer)
        yield port
