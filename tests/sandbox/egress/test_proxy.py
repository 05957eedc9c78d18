"""The proxy of sandboxes with an allowlist: it passes requests for allowed hosts and refuses all others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from envkit import clock
from envkit.sandbox.egress import proxy
from envkit.sandbox.egress.allowlist import Address, Allowlist, RefusedError, Resolve, is_public, why_refused
from envkit.sandbox.egress.proxy import ProxyRequest
from envkit.types import SandboxSpec
from tests.sandbox.egress.internet import TIMEOUT_S, web_server
from tests.sandbox.fake.backend import FakeBackend, FakeSandbox

HOSTS = ("ok.example", "*.below.example")


@asynccontextmanager
async def bounded(seconds: float) -> AsyncIterator[None]:
    with anyio.fail_after(seconds):
        yield


async def asked(request: bytes, *, resolve: Resolve | None = None, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the proxy's answer to a client in a sandbox; host names resolve to a test server, or by `resolve`."""
    waiting: list[socket.socket] = []
    came = anyio.Event()

    class Dialled(FakeSandbox):
        async def connect(self, address: str | int) -> socket.socket:
            assert address == proxy.SOCKET
            ours, theirs = socket.socketpair()
            for end in (ours, theirs):
                end.setblocking(False)
            waiting.append(theirs)
            came.set()
            return ours

    async with (
        bounded(timeout_s),
        web_server() as everywhere,
        FakeBackend(kind=Dialled) as backend,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(proxy.serve, await backend.start(SandboxSpec()), Allowlist(HOSTS, resolve or everywhere))
        await came.wait()
        loop = asyncio.get_running_loop()
        client, answer = waiting.pop(), b""
        with client:
            await loop.sock_sendall(client, request)
            while piece := await loop.sock_recv(client, 1 << 16):
                answer += piece
        tasks.cancel_scope.cancel()
    for one in waiting:
        one.close()
    return answer


@pytest.mark.parametrize("host", ["ok.example", "OK.Example", "ok.example.", "a.below.example", "a.b.below.example"])
def test_a_request_for_a_host_on_the_allowlist_is_passed_on(host: str) -> None:
    answer = clock.run(asked, b"GET http://%s/a?b=c HTTP/1.1\r\nAccept: x\r\n\r\n" % host.encode())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n\r\nGET /a?b=c HTTP/1.1\r\n")
    assert b"\r\nAccept: x\r\n" in answer


@pytest.mark.parametrize(
    ("request_line", "refusal"),
    [
        (b"GET http://no.example/", b"403 no.example is not on the allowlist"),
        (b"GET http://below.example/", b"403 below.example is not on the allowlist"),
        (b"GET http://evilbelow.example/", b"403 evilbelow.example is not on the allowlist"),
        (b"GET http://ok.example:8080/", b"403 port 8080 is refused"),
        (b"CONNECT ok.example:22", b"403 port 22 is refused"),
        (b"CONNECT no.example:443", b"403 no.example is not on the allowlist"),
        (b"GET http://ok.example@no.example/", b"400 not a request to a proxy"),
        (b"GET ftp://ok.example/", b"400 ftp://ok.example/ is refused"),
        (b"GET /etc/passwd", b"400 not a request to a proxy"),
        (b"GET http://no.example\0.below.example/", b"400 not a request"),
        (b"GET\nHost:no.example http://ok.example/", b"400 not a request"),
    ],
)
def test_a_request_that_is_not_allowed_is_refused_with_a_reason(request_line: bytes, refusal: bytes) -> None:
    answer = clock.run(asked, request_line + b" HTTP/1.1\r\n\r\n")
    status, _, body = answer.partition(b"\r\n")
    assert status.startswith(b"HTTP/1.1 " + refusal)
    assert body.endswith(b"\r\n\r\n" + status.split(b" ", 2)[2] + b"\n")


def test_a_tunnel_carries_bytes_both_ways() -> None:
    answer = clock.run(asked, b"CONNECT ok.example:443 HTTP/1.1\r\n\r\nanything\r\n\r\n")
    assert answer == b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK\r\n\r\nanything\r\n\r\n"


def test_a_large_answer_arrives_whole() -> None:
    answer = clock.run(asked, b"GET http://ok.example/large HTTP/1.1\r\n\r\n")
    assert len(answer) == len(b"HTTP/1.1 200 OK\r\n\r\n") + (1 << 22)


def test_an_endless_request_head_is_refused() -> None:
    answer = clock.run(asked, b"GET http://ok.example/ HTTP/1.1\r\nX: " + b"x" * (65 << 10))
    assert answer.startswith(b"HTTP/1.1 400 not a request\r\n")


def test_the_host_header_names_the_host_that_was_checked() -> None:
    head = b"GET http://ok.example/ HTTP/1.1\r\nHost: no.example\r\nhost : no.example\r\nConnection: keep-alive\r\n\r\n"
    request = ProxyRequest.parse(head)
    assert (request.host, request.port) == ("ok.example", 80)
    assert request.head == b"GET / HTTP/1.1\r\nHost: ok.example\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "trick", [b"X: a\nHost: no.example", b"X: a\rHost: no.example", b"X: a\0b", b" goes on", b"X: a\r\n\tgoes on"]
)
def test_headers_that_a_server_may_parse_differently_are_refused(trick: bytes) -> None:
    with pytest.raises(RefusedError, match="not a request"):
        ProxyRequest.parse(b"GET http://ok.example/ HTTP/1.1\r\n" + trick + b"\r\n\r\n")


def test_proxy_credentials_are_not_forwarded() -> None:
    request = ProxyRequest.parse(b"GET http://ok.example/ HTTP/1.1\r\nProxy-Authorization: Basic eA==\r\n\r\n")
    assert b"eA==" not in request.head


NOT_PUBLIC = """
127.0.0.1 10.0.0.1 172.17.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 ::1
:: fe80::1 fe80::1%eth0 fd00:ec2::254 ::ffff:10.0.0.1 64:ff9b::a9fe:a9fe 2002:7f00:1:: 2001:0:a9fe:a9fe::1
ff02::1 168.63.129.16 192.0.0.8 192.0.0.9 192.31.196.1 192.52.193.1 192.88.99.1 192.175.48.1 ::1.1.1.1
::ffff:1.1.1.1 64:ff9b::1.1.1.1 64:ff9b:1::1 100::1 2001:1::1 2001:20::1 2001:db8::1 2620:4f:8000::1 3fff::1
5f00::1
"""
PUBLIC = "1.1.1.1 93.184.216.34 168.63.129.17 2606:4700:4700::1111 2001:4860:4860::8888"


def test_addresses_of_this_host_and_its_networks_are_not_public() -> None:
    assert [address for address in (*NOT_PUBLIC.split(), "no address") if is_public(address)] == []
    assert [address for address in PUBLIC.split() if not is_public(address)] == []


def test_a_name_of_this_host_has_no_public_address() -> None:
    async def main() -> None:
        with pytest.raises(RefusedError, match="localhost has no public address"):
            await Allowlist(["localhost"]).connect("localhost", 80)

    clock.run(main)


@pytest.mark.parametrize(
    "host", ["localhost\0.below.example", "*.below.example", "a b.below.example", "\u0430.below.example"]
)
def test_an_invalid_host_name_is_never_resolved(host: str) -> None:
    async def resolve(host: str, port: int) -> Sequence[Address]:
        raise AssertionError(host)

    async def main() -> int:
        with pytest.raises(RefusedError, match="is not on the allowlist") as refusal:
            await Allowlist(HOSTS, resolve).connect(host, 80)
        return refusal.value.status

    assert clock.run(main) == 403


def test_an_idle_connection_is_closed_after_five_minutes() -> None:
    async def main() -> tuple[bytes, float]:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port: int = silent.getsockname()[1]

            async def resolve(host: str, asked_port: int) -> Sequence[Address]:
                return [("127.0.0.1", port)]

            answer = await asked(b"GET http://ok.example/ HTTP/1.1\r\n\r\n", resolve=resolve, timeout_s=1000)
        return answer, clock.now()

    answer, ended = clock.run(main, virtual=True)
    assert answer == b""
    assert 300 <= ended < 301


def test_a_host_that_does_not_answer_is_a_bad_gateway() -> None:
    async def resolve(host: str, port: int) -> Sequence[Address]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            free: int = server.getsockname()[1]
        return [("127.0.0.1", free)]

    async def main() -> int:
        with pytest.raises(RefusedError, match="does not answer on port 443") as refusal:
            await Allowlist(["ok.example"], resolve).connect("ok.example", 443)
        return refusal.value.status

    assert clock.run(main) == 502


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (SandboxSpec(network="none"), None),
        (SandboxSpec(network="open"), None),
        (SandboxSpec(network=("example.org", "*.example.org", "10.0.0.1")), None),
        (SandboxSpec(network="example.org"), "network='example.org' is invalid"),
        (SandboxSpec(network=("http://example.org",)), "'http://example.org' is not a host name"),
        (SandboxSpec(network=("*",)), "'*' is not a host name"),
        (SandboxSpec(network=("a*.example.org",)), "is not a host name"),
        (SandboxSpec(network=("example.org",), detached=True), "a detached sandbox cannot have an allowlist"),
    ],
)
def test_an_invalid_network_is_refused_with_a_reason(spec: SandboxSpec, why: str | None) -> None:
    found = why_refused(spec)
    assert found == why if why is None or found is None else why in found
