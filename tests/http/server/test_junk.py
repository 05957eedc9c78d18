"""Invalid input over HTTP: the server refuses it with a problem and continues."""

from __future__ import annotations

import anyio
import httpx
import pytest

from tests.http.stage import over_http

UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: %b\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)

NO_REQUESTS = [
    b"FOO / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01",
    UPGRADE % b"h2c",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x00\x01\x02\r\n\r\n",
    b"PUT /v1/sessions/a HTTP/1.1\r\ncontent-length: -4\r\n\r\n{}",
]


def test_an_invalid_request_is_refused_without_a_log_entry(caplog: pytest.LogCaptureFixture) -> None:
    async def main(client: httpx.AsyncClient) -> None:
        for text in NO_REQUESTS:
            async with await anyio.connect_tcp(client.base_url.host, client.base_url.port or 0) as stream:
                await stream.send(text)
                received = await stream.receive()
                assert received.startswith(b"HTTP/1.1 ")
                assert not received.startswith(b"HTTP/1.1 5")
        async with await anyio.connect_tcp(client.base_url.host, client.base_url.port or 0) as stream:
            await stream.send(UPGRADE % b"websocket")
            assert (await stream.receive()).startswith(b"HTTP/1.1 101 ")
            await stream.send(b"\x81\x82\x00\x00\x00\x00\xff\xfe")  # a text frame that is not UTF-8
            assert (await stream.receive())[:1] == b"\x88"
        assert (await client.get("/v1/health")).status_code == 200

    over_http(main)
    assert caplog.messages == []
