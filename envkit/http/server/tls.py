"""TLS handshakes: each has a deadline and is counted beside the connections, since a client can leave it unfinished.

The server's own listening would tell of a connection only when its handshake is over, and of one that fails never.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sized
from contextlib import suppress

import anyio

from envkit import clock
from envkit.http.server.http_connection import HEAD_S, STANDING

HANDSHAKE_S = HEAD_S
"""Seconds that a handshake may take."""

_REST_S = 0.5
"""Seconds without taking anybody, after there was no file or memory for it."""


class TlsAcceptor:
    """Those under way.

    Args:
        context: What is shown to clients.
        connections: Those whose handshake is over.
        most: How many are served at once.
    """

    def __init__(self, context: ssl.SSLContext, connections: Sized, most: int) -> None:
        self._context = context
        self._connections = connections
        self._most = most
        self._under_way: dict[anyio.CancelScope, float] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    async def accept(self, listener: socket.socket, opened: Callable[[], asyncio.Protocol]) -> None:
        """Take whoever comes, until cancelled; who comes when there are too many is dropped.

        Args:
            listener: Where they come.
            opened: Returns what is told of one whose handshake is over.
        """
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    link, _ = await loop.sock_accept(listener)
                except ConnectionError:  # it is gone already
                    continue
                except OSError:
                    await anyio.sleep(_REST_S)
                    continue
                if len(self._connections) + len(self._under_way) >= self._most * STANDING:
                    link.close()
                    continue
                scope = anyio.CancelScope()
                self._under_way[scope] = clock.now()
                tasks.start_soon(self._shake, scope, link, opened)

    def look(self, now: float, *, bound_s: float) -> None:
        """End those that began more than `bound_s` ago."""
        for scope, began in self._under_way.items():
            if now - began > bound_s:
                scope.cancel()

    async def _shake(
        self, scope: anyio.CancelScope, link: socket.socket, opened: Callable[[], asyncio.Protocol]
    ) -> None:
        try:
            with scope, suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    opened, link, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
                )
        finally:
            del self._under_way[scope]
