"""A server that runs environments in slots of its own process, on a host or in a sandbox.

In a sandbox it runs as ``python -m envkit.wiring.env_server --socket PATH [--capacity N]``, on a Unix socket. It stops
on SIGTERM, or when its parent closes the pipe or socket of its standard input. To show that the process is alive, a
thread answers each connection to a second socket (``env.heartbeat`` beside ``env.sock``) with one byte, even while an
environment blocks the event loop. The caller, not this server, enforces the timeout of a step.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from envkit import clock
from envkit.errors import UsageError
from envkit.http.api.app import create_app
from envkit.http.server.middleware import AuthMiddleware
from envkit.http.server.server import serve
from envkit.http.sessions.table import STEP_TIMEOUT_S, TTL_S
from envkit.wiring.environments import registered, slots


async def serve_envs(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: str | None = None,
    capacity: int = 64,
    ttl_s: float = TTL_S,
    step_timeout_s: float = STEP_TIMEOUT_S,
    on_ready: Callable[[str], None] | None = None,
    lazy: bool = False,
    sends_traces: bool = False,
) -> None:
    """Serve until SIGTERM, SIGINT or cancellation.

    Args:
        host: Name or address to listen on.
        port: TCP port; 0 chooses a free one.
        uds: Path of a Unix socket to listen on instead.
        capacity: Number of concurrent episodes.
        ttl_s: Seconds without a call after which a session expires.
        step_timeout_s: Seconds after which a step is cancelled and its session is broken.
        on_ready: Called once with the address, when the server accepts requests.
        lazy: Whether to build the OpenAPI application only when it gets a request, so that the server starts faster.
        sends_traces: Whether callers receive the tracebacks of environments.

    Raises:
        UsageError: The address cannot be used; the message says what to do.
    """
    async with slots(capacity) as envs:
        app = create_app(
            envs,
            envs=registered,
            ttl_s=ttl_s,
            step_timeout_s=step_timeout_s,
            lazy=lazy,
            sends_traces=sends_traces,
        )
        await serve(AuthMiddleware(app) if uds is None else app, host=host, port=port, uds=uds, on_ready=on_ready)


async def serve_inside(path: str, capacity: int) -> None:
    """Serve on the Unix socket `path` until a signal arrives or the parent process ends.

    Raises:
        UsageError: The path cannot be used.
    """
    with anyio.CancelScope() as scope:
        async with clock.background_tasks() as tasks:
            tasks.start_soon(_stop_without_parent, scope)
            await serve_envs(
                uds=path,
                capacity=capacity,
                step_timeout_s=math.inf,
                on_ready=lambda address: _serve_heartbeats(Path(path).with_suffix(".heartbeat")),
                lazy=True,
                sends_traces=True,  # send traces to the parent process, which decides what its callers get
            )


async def _stop_without_parent(scope: anyio.CancelScope) -> None:
    stdin = sys.stdin.fileno()
    mode = os.fstat(stdin).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return  # a terminal, a file or /dev/null does not tell when the parent ends
    while True:
        await anyio.wait_readable(stdin)
        if not os.read(stdin, 1 << 16):
            scope.cancel()
            return


def _serve_heartbeats(path: Path) -> None:
    """Answer heartbeats on the socket `path` from a daemon thread."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def answer() -> None:
        while True:
            caller, _ = listener.accept()
            with caller, suppress(OSError):  # the peer may have disconnected
                caller.send(b"1")

    threading.Thread(target=answer, name="heartbeat", daemon=True).start()  # noqa: TID251 - must not depend on the event loop


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="envkit.wiring.env_server", description="Serve environments on a Unix socket."
    )
    parser.add_argument("--socket", required=True, metavar="PATH", help="Unix socket to listen on")
    parser.add_argument("--capacity", type=int, default=1, metavar="N", help="concurrent episodes (default 1)")
    options = parser.parse_args(arguments)
    if options.capacity < 1:
        parser.error("--capacity must be at least 1")
    try:
        clock.run(serve_inside, options.socket, options.capacity)
    except UsageError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
