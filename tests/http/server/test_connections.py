"""The internals of uvicorn that `envkit.http.server.connections` uses; uvicorn does not document them.

pyproject.toml therefore pins uvicorn exactly. To change the version, check each internal in the new source, then change
`VERSION`:

- `HttpToolsProtocol` and `WebSocketsSansIOProtocol` take the options of asyncio's protocol factory, and are called
  through `connection_made` and, at the end of the server, `shutdown`. Both are looked up on the instance.
- `HttpToolsProtocol` writes a reply's head and its body with two calls of `transport.write`.
- `HttpToolsProtocol` passes its `transport` to `connection_made` of the WebSocket when a request upgrades to one.
- `WebSocketsSansIOProtocol.shutdown` raises `InvalidState` if the closing handshake has begun, and then leaves
  `transport` open.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState
from websockets.exceptions import InvalidState

from envkit import clock
from envkit.http.protocol.asgi import Receive, Scope, Send
from envkit.http.server.connections import http_connection, websocket_connection

VERSION = "0.54.0"
ROOT = Path(__file__).parents[3]
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: here\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class RecordingTransport(asyncio.Transport):
    """Records each system call that a socket would need for the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.protocol: asyncio.BaseProtocol | None = None
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.writes.append(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def options() -> dict[str, Any]:
    config = Config(app, ws=websocket_connection, lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.load()
    return {"config": config, "server_state": ServerState(), "app_state": {}}


def test_uvicorn_is_pinned_to_the_version_whose_internals_were_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"uvicorn[standard]=={VERSION}" in project["optional-dependencies"]["serve"]
    assert version("uvicorn") == VERSION


@pytest.mark.parametrize(("verb", "ends"), [(b"GET", b"\r\n\r\nok"), (b"HEAD", b"\r\n\r\n")])
def test_a_reply_with_a_known_length_is_one_write(verb: bytes, ends: bytes) -> None:
    async def main() -> list[bytes]:
        transport = RecordingTransport()
        connection = http_connection(**options())
        connection.connection_made(transport)
        connection.data_received(verb + b" / HTTP/1.1\r\nHost: here\r\n\r\n")
        for _ in range(5):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        return transport.writes

    (written,) = clock.run(main)
    assert written.startswith(b"HTTP/1.1 200 OK\r\n")
    assert written.endswith(ends)


def test_a_websocket_writes_to_the_socket_itself_and_closes_it_even_if_its_shutdown_fails() -> None:
    async def main() -> None:
        transport = RecordingTransport()
        http = http_connection(**options())
        http.connection_made(transport)
        http.data_received(UPGRADE)
        for _ in range(5):
            await asyncio.sleep(0)
        websocket: Any = transport.protocol
        assert websocket.transport is transport
        assert transport.writes[-1].startswith(b"HTTP/1.1 101 Switching Protocols\r\n")

        websocket.conn.send_close(1000)  # the closing handshake has begun, so that the shutdown is invalid
        with pytest.raises(InvalidState):
            type(websocket).shutdown(websocket)
        assert not transport.is_closed
        websocket.shutdown()
        assert transport.is_closed

    clock.run(main)
