"""Overload of a real server: half-open connections, bodies that are too large, and replies that nobody reads.

Time limits are ten times what the documents say.
"""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import httpx
import pytest

from envkit import clock
from tests.e2e.serve.gateway import Gateway, gateway

pytestmark = [pytest.mark.bwrap, pytest.mark.xdist_group("junk")]

HALF_OPEN = 2000
READERS = 40
REPLY_BYTES = 16 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("serve"), has_tokens=False) as running:
        yield running


def test_half_open_connections_do_not_delay_others(server: Gateway) -> None:
    url = urlsplit(server.url)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < HALF_OPEN + 500:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HALF_OPEN + 500), hard))
    with ExitStack() as connections, httpx.Client(base_url=server.url, trust_env=False) as client:
        for _ in range(HALF_OPEN):
            connection = connections.enter_context(socket.create_connection((url.hostname or "", url.port or 0), 10))
            connection.sendall(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n")
        waits = []
        for _ in range(21):
            began = clock.stopwatch()
            assert client.get("/v1/health").status_code == 200
            waits.append(clock.stopwatch() - began)
        assert median(waits) < 0.5


def test_large_replies_that_nobody_reads_do_not_fill_the_memory(server: Gateway) -> None:
    url = urlsplit(server.url)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        assert client.put("/v1/sandboxes/loud", json={}).status_code == 200
        path = "/v1/sandboxes/loud/files?path=large"
        assert client.put(path, content=b"x" * REPLY_BYTES).status_code == 200
        before = _memory_mib(server.process_id)
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        with ExitStack() as connections:
            for _ in range(READERS):
                stalled = connections.enter_context(socket.create_connection((url.hostname or "", url.port or 0), 30))
                stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stalled.sendall(request)
            highest = before
            began = clock.stopwatch()
            while clock.stopwatch() - began < 5:
                highest = max(highest, _memory_mib(server.process_id))
                assert client.get("/v1/health").status_code == 200
        assert highest < 500, json.dumps({"before": before, "highest": highest})
        with suppress(httpx.HTTPError):
            client.delete("/v1/sandboxes/loud")


def _memory_mib(process_id: int) -> float:
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024
