"""Invalid input over HTTP: the server refuses it with a problem and continues."""

from __future__ import annotations

import anyio
import httpx
import pytest

from tests.http.stage import over_http

DEEP = b'{"env_id":"Count-v0","seed":1,"options":{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}}"
BODIES = [
    b"",
    b"null",
    b"17",
    b"[]",
    b"[[]]",
    b"{}",
    b'"text"',
    b"{",
    b"\xff\xfe\x00",
    b"NaN",
    b'{"turn":0,"action":"\\ud800"}',
    b'{"turn":0,"action":"\\u0000"}',
    b'{"turn":0,"action":7}',
    b'{"turn":true,"action":"x"}',
    b'{"turn":-1,"action":"x"}',
    b'{"turn":0.0,"action":"x"}',
    b'{"turn":99999999999999999999999999,"action":"x"}',
    b'{"turn":1e999,"action":"x"}',
    b'{"turn":0,"action":"x","more":1}',
    b'{"turn":0}',
    b'[{"turn":0,"action":"x","session_id":"a"},null]',
    b'[{"turn":0,"action":"x","session_id":5}]',
    b'{"env_id":"Count-v0"}',
    b'{"env_id":7,"seed":1}',
    b'{"env_id":"Count-v0","seed":-1}',
    b'{"env_id":"Count-v0","seed":"1"}',
    b'{"env_id":"Count-v0","seed":1,"options":[]}',
    b'{"env_id":"Count-v0","seed":1,"options":{"end":-5}}',
    b'{"env_id":"Count-v0","seed":1,"option":{}}',
    b'{"env_id":"\\u0000","seed":1}',
    b'{"env_id":"../../etc/passwd","seed":1}',
    DEEP,
]
UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: %b\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
ROUTES = [
    ("PUT", "/v1/sessions/a"),
    ("PUT", "/v1/sessions/%00"),
    ("PUT", "/v1/sessions/" + "a" * 129),
    ("PUT", "/v1/sessions/a%2Fb"),
    ("PUT", "/v1/sessions/%ff%fe"),
    ("POST", "/v1/sessions/a/step"),
    ("POST", "/v1/sessions/%ff/step"),
    ("POST", "/v1/sessions//step"),
    ("POST", "/v1/sessions/a/b/step"),
    ("POST", "/v1/sessions:step"),
    ("POST", "/v1/sessions"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/a"),
    ("GET", "/v1/sessions/a/step"),
    ("DELETE", "/v1/sessions/%2e%2e"),
    ("DELETE", "/v1/sessions"),
    ("GET", "/v1/envs"),
    ("GET", "/v1/ws"),
    ("POST", "/v1/health"),
    ("PATCH", "/v1/ready"),
    ("OPTIONS", "/metrics"),
    ("GET", "/v2/sessions"),
    ("GET", "//"),
    ("TRACE", "/" + "x" * 4000),
]


def test_an_invalid_request_is_refused_without_a_log_entry(caplog: pytest.LogCaptureFixture) -> None:
    async def main(client: httpx.AsyncClient) -> None:
        for text in (b"FOO / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", UPGRADE % b"h2c"):
            async with await anyio.connect_tcp(client.base_url.host, client.base_url.port or 0) as stream:
                await stream.send(text)
                assert (await stream.receive()).startswith(b"HTTP/1.1 ")
        async with await anyio.connect_tcp(client.base_url.host, client.base_url.port or 0) as stream:
            await stream.send(UPGRADE % b"websocket")
            assert (await stream.receive()).startswith(b"HTTP/1.1 101 ")
            await stream.send(b"\x81\x82\x00\x00\x00\x00\xff\xfe")  # a text frame that is not UTF-8
            assert (await stream.receive())[:1] == b"\x88"

    over_http(main)
    assert caplog.messages == []


@pytest.mark.parametrize("route", ROUTES, ids=[f"{verb} {path[:30]}" for verb, path in ROUTES])
def test_junk_gets_a_problem_as_answer(route: tuple[str, str]) -> None:
    async def main(client: httpx.AsyncClient) -> None:
        verb, path = route
        for body in BODIES:
            answer = await client.request(verb, path, content=body)
            assert answer.status_code < 500, (body[:60], answer.text)
            if answer.status_code >= 400:
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["status"] == answer.status_code
        assert (await client.get("/v1/health")).status_code == 200

    over_http(main, capacity=100)


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
        b"PUT /v1/sessions/a HTTP/1.1\r\ncontent-length: -4\r\n\r\n{}",
    ],
)
def test_input_that_is_not_http_does_not_stop_the_server(request_line: bytes) -> None:
    async def main(client: httpx.AsyncClient) -> None:
        url = client.base_url
        with anyio.fail_after(5):
            async with await anyio.connect_tcp(url.host, url.port or 0) as stream:
                await stream.send(request_line)
                assert not (await stream.receive()).startswith(b"HTTP/1.1 5")
        assert (await client.get("/v1/health")).status_code == 200

    over_http(main)
