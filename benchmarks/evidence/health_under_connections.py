"""Hold 2,000 half-open connections to a server, and measure how long `/v1/health` takes meanwhile.

    python benchmarks/evidence/health_under_connections.py

A half-open connection has sent a part of a request and nothing more. Server and clients run on this machine and use its
loopback address. Each request of `/v1/health` opens a connection of its own. The exit status is 1 if the median exceeds
50 ms, or if the server has closed one of the half-open connections.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from record import Evidence, parser

from envkit import clock
from tests.e2e.serve.gateway import gateway

NAME = "health-under-connections"
STALE_AFTER = ("envkit/http/server", "envkit/http/api")
TWIN = "tests/e2e/serve/test_overload.py::test_half_open_connections_do_not_delay_others"
MOST_S = 0.05
HALF_OPEN = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HALF_OPEN + b"Connection: close\r\n\r\n"


def measured(connections: int, requests: int) -> dict[str, Any]:
    """Return the figures with this number of half-open connections."""
    with ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        url = urlsplit(resources.enter_context(gateway(folder, has_tokens=False)).url)
        address = str(url.hostname), int(url.port or 0)
        half_open = []
        for _ in range(connections):
            half_open.append(resources.enter_context(socket.create_connection(address, 10)))
            half_open[-1].sendall(HALF_OPEN)
        waits = [_health_s(address) for _ in range(requests)]
        return {
            "requests": requests,
            "median_ms": round(1000 * statistics.median(waits), 2),
            "p99_ms": round(1000 * statistics.quantiles(waits, n=100)[98], 2),
            "longest_ms": round(1000 * max(waits), 2),
            "half_open_after": sum(map(_is_open, half_open)),
        }


def _health_s(address: tuple[str, int]) -> float:
    began = clock.stopwatch()
    with socket.create_connection(address, 10) as connection:
        connection.sendall(WHOLE)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    return clock.stopwatch() - began


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def main() -> int:
    """Measure, and return the exit code: 1 if the server was too slow or closed connections."""
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--connections", type=int, default=2000, help="number of half-open connections")
    arguments.add_argument("--requests", type=int, default=2000, help="requests of /v1/health")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    for connections in (0, asked.connections):
        name = f"{connections} half-open connections"
        figures = evidence.part(name, partial(measured, connections, asked.requests))
        print(name, json.dumps(figures), flush=True)
    return 0 if figures["median_ms"] <= 1000 * MOST_S and figures["half_open_after"] == asked.connections else 1


if __name__ == "__main__":
    sys.exit(main())
