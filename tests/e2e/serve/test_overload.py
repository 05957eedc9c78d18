"""Overload of a real server: half-open connections, and bodies that are too large.

Time limits are ten times what the documents say.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median
from urllib.parse import urlsplit

import httpx
import pytest

from envkit import clock
from tests.e2e.serve.gateway import Gateway, gateway

pytestmark = [pytest.mark.bwrap, pytest.mark.xdist_group("junk")]

HALF_OPEN = 2000


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
