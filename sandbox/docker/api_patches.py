"""Workarounds for the package `docker`: it leaks sockets of refused connections, and reads events without timeout."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from envkit.installation import load


def close_refused_sockets(api: Any, path: str) -> None:
    """Make `api` close a socket immediately if the daemon at `path` refuses the connection.

    The package leaves the socket to the garbage collector, which emits a `ResourceWarning`.
    """
    package = load("docker.transport.unixconn")
    connection: Any = type("Connection", (package.UnixHTTPConnection,), {"connect": _connect})
    adapter = api.get_adapter(api.base_url)
    pool_of, timeout_s = adapter.get_connection, api.timeout

    def get_connection(url: str, proxies: object = None) -> Any:
        pool = pool_of(url, proxies)
        pool._new_conn = partial(connection, url, path, timeout_s)
        return pool

    adapter.get_connection = get_connection


def events(
    api: Any, since: float, until: float, filters: Mapping[str, Sequence[str]]
) -> Generator[Mapping[str, Any], None, None]:
    """Yield the daemon's events between two Unix times. If `until` is in the future, wait for events until then.

    The events end early if the daemon exits.

    Raises:
        OSError: The daemon refuses the request, or does not answer within the timeout of `api`.
    """
    broken_off = load("requests.exceptions").ChunkedEncodingError
    query = {"since": f"{since:.3f}", "until": f"{until:.3f}", "filters": json.dumps(filters)}
    address = f"{api.base_url}/v{api.api_version}/events"
    with api.get(address, params=query, stream=True, timeout=api.timeout) as answer:
        answer.raise_for_status()
        with suppress(broken_off):
            for line in answer.iter_lines():
                yield json.loads(line)


def close_stream(lines: Any) -> None:
    """Close the connection of a stream of the package that was not read to its end; the package leaves it open."""
    if lines.gi_frame is not None:
        lines.gi_frame.f_locals["response"].close()


def _connect(connection: Any) -> None:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(connection.timeout)
        stream.connect(connection.unix_socket)
    except BaseException:
        stream.close()
        raise
    connection.sock = stream
