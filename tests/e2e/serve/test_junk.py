"""Invalid requests to a real gateway: it rejects them in time, and stays up."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.e2e.serve.gateway import Gateway, gateway, memory

pytestmark = [pytest.mark.bwrap, pytest.mark.xdist_group("junk")]

DEEP = b"[" * 100_000 + b"]" * 100_000
TARGETS = [
    "/v1/sandboxes/%00",
    "/v1/sandboxes/..%2f..%2fetc%2fpasswd",
    "/v1/sandboxes/%ff%fe",
    "/v1/sandboxes/\u2603".encode().decode("latin-1"),
    "/v1/sandboxes/known/files?path=%00",
    "/v1/sandboxes/known/files?path=..%2f..%2f..%2fetc%2fshadow",
    "/v1/sandboxes/known/files?path=" + "a/" * 3000,
    "/v1/sandboxes/known/files?path=x&max_bytes=-1",
    "/v1/sandboxes/known/files?path=x&max_bytes=NaN",
    "/v1/sandboxes/known/files?path=%2fproc%2fself%2fmem",
    "/v1/sandboxes/known/files?path=%2fdev%2fzero",
    "/v1/sandboxes/known/tree?path=%2f&max_bytes=1",
    "/v1/sandboxes/known/tree?path=%2fdev",
    "/v1/sandboxes/known/shells/%2e%2e",
    "/v1/sessions/%00",
    "/v1/../v1/health",
    "//v1//health",
    "/openapi.json?" + "&".join(f"a{number}=b" for number in range(2000)),
]
FRAMES: list[bytes | str] = [
    b"",
    "",
    b"\x00\xff",
    "null",
    "[" * 50_000,
    "[]",
    "[[]]",
    '{"id":1}',
    '{"id":1e999,"method":"health","params":{}}',
    '{"id":"\\ud800","method":"health","params":{}}',
    '{"id":2,"method":"' + "x" * 900_000 + '","params":{}}',
    '{"id":3,"method":"sandbox.' + "y" * 900_000 + '","params":{}}',
    '{"id":4,"method":"sandbox.exec","params":' + DEEP.decode() + "}",
    '{"id":5,"method":"sandbox.exec","params":{"sandbox_id":"known","argv":[],"timeout_s":1}}',
    '{"id":6,"method":"sandbox.write","params":{"sandbox_id":"known","path":"\\u0000","content":"AA=="}}',
    '{"id":7,"method":"create","params":{"session_id":"a","env_id":"' + "z" * 900_000 + '","seed":1}}',
    '{"id":8,"method":"sandbox.stop","params":{"sandbox_id":"../known"}}',
    '{"id":8,"id":9,"method":"health","params":{}}',
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, str]]:
    with gateway(tmp_path_factory.mktemp("gateway")) as server:
        token = server.token("research", "play,sandbox")
        with server.client(token) as client:
            client.put("/v1/sandboxes/known", json={"disk_mib": 16, **memory(128)}).raise_for_status()
        yield server, token


@pytest.mark.parametrize("target", TARGETS, ids=[target[:60] for target in TARGETS])
@pytest.mark.parametrize("verb", ["GET", "PUT", "POST", "DELETE", "HEAD", "BREW"])
def test_invalid_targets_are_rejected(served: tuple[Gateway, str], verb: str, target: str) -> None:
    status, kind, content = _raw(served, f"{verb} {target} HTTP/1.1\r\nContent-Length: 2\r\n".encode("latin-1"), b"{}")
    if status >= 400 and verb != "HEAD" and kind:
        _is_problem(status, kind, content)
    assert status < 500, content


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/sandboxes HTTP/1.1\r\nX-Long: " + b"x" * 200_000 + b"\r\n",
        b"GET /v1/sandboxes HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % number for number in range(5_000)),
        b"GET /v1/sandboxes HTTP/1.1\r\nX-Request-Id: \xff\xfe\r\nIdempotency-Key: \xff\r\n",
        b"POST /v1/sandboxes/known/exec HTTP/1.1\r\nIdempotency-Key: a b\r\nContent-Length: 2\r\n",
        b"POST /v1/sandboxes/known/exec HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n",
    ],
)
def test_invalid_heads_are_rejected(served: tuple[Gateway, str], head: bytes) -> None:
    status, _, content = _raw(served, head, b"{}" if b"Content-Length" in head else b"")
    assert 200 <= status < 500, content


def test_a_stalled_chunked_body_ends_with_its_connection(served: tuple[Gateway, str]) -> None:
    server, token = served
    for target in ("known/exec", "known/files?path=never", "known/tree?path=never"):
        verb = "POST" if target == "known/exec" else "PUT"
        with _connected(server) as link:
            link.sendall(_head(f"{verb} /v1/sandboxes/{target} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", token))
            link.sendall(b'5\r\n{"arg\r\n')
    with server.client(token) as client:
        assert client.get("/v1/sandboxes/known/files?path=never").status_code == 404
        assert (
            client.post("/v1/sandboxes/known/exec", content=b'{"argv":["true"],"timeout_s":5}').json()["exit_code"] == 0
        )


def test_invalid_frames_are_rejected(served: tuple[Gateway, str]) -> None:
    server, token = served
    url = f"{server.url.replace('http', 'ws')}/v1/ws"
    headers = {"Authorization": f"Bearer {token}"}
    with connect(url, additional_headers=headers, proxy=None) as link:
        for frame in FRAMES:
            link.send(frame)
            link.send('{"id":"after","method":"health","params":{}}')
            received = b""
            while b'"after"' not in received:
                answer = link.recv(timeout=10)
                received = answer.encode() if isinstance(answer, str) else answer
                assert len(received) < 100_000
                assert b"internal server error" not in received
    with connect(url, additional_headers=headers, proxy=None) as link:
        with suppress(ConnectionClosed):
            link.send(b"x" * (17 << 20))
        with pytest.raises(ConnectionClosed):
            link.recv(timeout=10)
    with _connected(server) as link:
        upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
        link.sendall(_head(f"GET /v1/ws HTTP/1.1\r\n{upgrade}AAAAAAAAAAAAAAAAAAAAAA==\r\n", token))
        assert link.recv(4096).startswith(b"HTTP/1.1 101")
        link.sendall(os.urandom(5000))
        while link.recv(4096):
            pass


def _raw(served: tuple[Gateway, str], head: bytes, body: bytes) -> tuple[int, str, bytes]:
    """Return status, content type and content of the answer to raw bytes; status 0 without an answer."""
    server, token = served
    with _connected(server) as link:
        link.sendall(_head(head.decode("latin-1"), token) + body)
        received = b""
        while b"\r\n\r\n" not in received:
            piece = link.recv(65536)
            if not piece:
                break
            received += piece
        start, _, rest = received.partition(b"\r\n\r\n")
        lines = start.decode("latin-1").lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        size = 0 if head.startswith(b"HEAD") else int(fields.get("content-length", "0"))
        while len(rest) < size:
            piece = link.recv(65536)
            assert piece
            rest += piece
    return int(lines[0].split(" ")[1]), fields.get("content-type", ""), rest


def _connected(server: Gateway) -> socket.socket:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 0), timeout=20)


def _head(lines: str, token: str) -> bytes:
    return f"{lines}Host: here\r\nAuthorization: Bearer {token}\r\n\r\n".encode("latin-1")


def _is_problem(status: int, kind: str, content: bytes) -> None:
    assert 400 <= status < 500 or status == 503, content[:500]
    if kind == "application/problem+json":
        assert json.loads(content)["status"] == status
        assert len(content) < 10_000
    else:
        assert (status, kind) == (400, "text/plain; charset=utf-8"), content[:500]  # not even HTTP
