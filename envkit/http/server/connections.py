"""uvicorn's connections, changed so that a reply needs one system call instead of two.

The connections are instances of uvicorn's own classes. This module replaces some of their methods by wrappers, so
pyproject.toml pins uvicorn exactly. tests/http/server/test_connections.py lists the internals that this module uses.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState


class CoalescingTransport:
    """A transport that writes the head of a reply together with its body, if the body has a known length.

    uvicorn itself writes head and body separately. A second system call would take a sixth of the time of a step.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.is_closing = transport.is_closing
        self._loop = asyncio.get_running_loop()
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        head, self._head = self._head, None
        if head is not None:
            self.transport.writelines((head, data))
        elif data.startswith(b"HTTP/") and b"\r\ncontent-length: " in data:
            self._head = data
            self._loop.call_soon(self._flush)  # in case no body follows, as in a reply to HEAD
        else:
            self.transport.write(data)

    def close(self) -> None:
        self._flush()
        self.transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            self.transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


def http_connection(**options: Any) -> HttpToolsProtocol:
    """Return a new HTTP connection. uvicorn calls this and passes the `options`."""
    connection = HttpToolsProtocol(**options)
    made = connection.connection_made

    def connection_made(transport: asyncio.BaseTransport) -> None:
        made(cast("asyncio.Transport", CoalescingTransport(cast("asyncio.Transport", transport))))

    connection.connection_made = connection_made  # type: ignore[method-assign]
    return connection


def websocket_connection(**options: Any) -> WebSocketsSansIOProtocol:
    """Return a new WebSocket connection. uvicorn calls this and passes the `options`."""
    connection = WebSocketsSansIOProtocol(**options)
    made, shutdown = connection.connection_made, connection.shutdown

    def connection_made(transport: asyncio.BaseTransport) -> None:
        made(transport.transport if isinstance(transport, CoalescingTransport) else transport)

    def shut_down() -> None:
        # If the client closes the socket at the same time, `shutdown` raises InvalidState, which is harmless here.
        with suppress(InvalidState):
            shutdown()
        connection.transport.close()

    connection.connection_made = connection_made  # type: ignore[method-assign]
    connection.shutdown = shut_down  # type: ignore[method-assign]
    return connection
