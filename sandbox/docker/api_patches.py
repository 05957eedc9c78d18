"""What the docker package's client does otherwise than it should, done here: it leaves sockets open that nobody
accepts, and waits for events without a bound.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from envkit.installation import load


def close_what_is_refused(api: Any, path: str) -> None:
    """Have `api` close the sockets by which it does not reach the daemon at `path`, at once.

    The package leaves that to the garbage collector, which warns of it whenever it comes by.
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
    """Give what has happened at the daemon between two moments, in seconds since 1970, of which one may be to come.

    Of a daemon that ends meanwhile it is what came before.

    Raises:
        OSError: It says nothing for as long as `api` waits, or refuses.
    """
    broken_off = load("requests.exceptions").ChunkedEncodingError
    asked = {"since": f"{since:.3f}", "until": f"{until:.3f}", "filters": json.dumps(filters)}
    address = f"{api.base_url}/v{api.api_version}/events"
    with api.get(address, params=asked, stream=True, timeout=api.timeout) as answer:
        answer.raise_for_status()
        with suppress(broken_off):
            for line in answer.iter_lines():
                yield json.loads(line)


def _connect(connection: Any) -> None:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(connection.timeout)
        stream.connect(connection.unix_socket)
    except BaseException:
        stream.close()
        raise
    connection.sock = stream
