"""TLS handshakes: each has a timeout and counts as a connection, because a client may never finish it.

asyncio's own server reports a connection only after its handshake, and never reports a failed one.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sized
from contextlib import suppress

import anyio

from envkit import clock
from envkit.http.server.http_connection import HEAD_S, OPEN_FACTOR

HANDSHAKE_S = HEAD_S
"""Timeout of a handshake, seconds."""

_BACKOFF_S = 0.5
"""Seconds before the next accept, after the process had no file descriptor or memory left."""


class TlsAcceptor:
    """Accepts TLS connections; its length is the number of handshakes in progress.

    Args:
        context: Certificate and settings.
        connections: Established connections.
        max_connections: Limit on concurrent connections.
    """

    def __init__(self, context: ssl.SSLContext, connections: Sized, max_connections: int) -> None:
        self._context = context
        self._connections = connections
        self._max_connections = max_connections
        self._handshakes: dict[anyio.CancelScope, float] = {}

    def __len__(self) -> int:
        return len(self._handshakes)

    async def accept(self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections until cancelled; drop those above `max_connections` times `OPEN_FACTOR`.

        Args:
            listener: Listening socket.
            make_protocol: Returns the protocol of a connection whose handshake is complete.
        """
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except ConnectionError:  # already closed
                    continue
                except OSError:
                    await anyio.sleep(_BACKOFF_S)
                    continue
                if len(self._connections) + len(self._handshakes) >= self._max_connections * OPEN_FACTOR:
                    connection.close()
                    continue
                scope = anyio.CancelScope()
                self._handshakes[scope] = clock.now()
                tasks.start_soon(self._shake_hands, scope, connection, make_protocol)

    def enforce_timeouts(self, now: float, *, bound_s: float) -> None:
        """Cancel handshakes that began more than `bound_s` seconds ago."""
        for scope, began in self._handshakes.items():
            if now - began > bound_s:
                scope.cancel()

    async def _shake_hands(
        self, scope: anyio.CancelScope, connection: socket.socket, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        try:
            with scope, suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    make_protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
                )
        finally:
            del self._handshakes[scope]
