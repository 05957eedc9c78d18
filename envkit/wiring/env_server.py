"""The environment server: a program that runs in a sandbox and plays several episodes at once in its own process.

It runs as ``python -m envkit.wiring.env_server --socket PATH [--capacity N]``, on a Unix socket. As the trusted worker
of a gateway, which is not in a sandbox, it also has ``--sandboxes URL`` and ``--judge MODEL@URL``. It stops on SIGTERM,
or when its parent closes the pipe or socket of its standard input. To show that the process is alive, a thread answers
each connection to a second socket (``env.heartbeat`` beside ``env.sock``) with one byte, even while an environment
blocks the event loop. The caller, not this server, enforces the timeouts of resets, steps and graders.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import stat
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import anyio

from envkit import clock
from envkit.errors import UsageError
from envkit.http.api.app import create_app
from envkit.http.server.server import serve
from envkit.protocols import SandboxPool
from envkit.wiring.environments import Resources, registered, slots

_REMOVE_S = 5.0


async def serve_inside(path: str, capacity: int, sandboxes: str | None = None, judge: str | None = None) -> None:
    """Serve up to `capacity` concurrent episodes on the Unix socket `path`, until a signal or the end of the parent.

    Args:
        path: The socket.
        capacity: Maximum number of concurrent episodes.
        sandboxes: Address of the pool that leases sandboxes to environments; None for no sandboxes.
        judge: Address of the judge; None for no judge. See `envkit.wiring.judge.open_judge`.

    Raises:
        UsageError: The path cannot be used.
    """

    def on_ready(address: str) -> None:
        _serve_heartbeats(Path(path).with_suffix(".heartbeat"))

    with anyio.CancelScope() as scope:
        async with (
            clock.background_tasks() as tasks,
            _resources(sandboxes, judge) as resources,
            slots(capacity, None, resources) as envs,
        ):
            tasks.start_soon(_stop_without_parent, scope)
            app = create_app(
                envs,
                envs=registered,
                step_timeout_s=math.inf,
                reset_timeout_s=math.inf,
                grade_timeout_s=math.inf,
                lazy=True,  # the server starts faster without the OpenAPI application, which hardly anybody needs here
                sends_traces=True,  # send tracebacks to the parent process, which decides what to forward to callers
            )
            await serve(app, uds=path, on_ready=on_ready)


@asynccontextmanager
async def _resources(sandboxes: str | None, judge: str | None) -> AsyncIterator[Resources]:
    """Open what environments may need. The clients are imported late: most servers need none of them."""
    async with AsyncExitStack() as parts:
        remedy = "set envs.judge to MODEL@URL in the configuration of the server"
        found = Resources(judge_remedy=remedy, builds_data=False)
        if sandboxes is not None:
            from envkit.environments.tasks.prepared import remove_prepared
            from envkit.http.client.sandbox_client import SandboxClient
            from envkit.sandbox.transfer import tar_stream

            client = await parts.enter_async_context(SandboxClient(sandboxes, folder_transport=tar_stream))
            pool = cast("SandboxPool", client)  # no `events`
            found = replace(found, sandboxes=pool)

            async def remove_snapshots() -> None:
                with anyio.move_on_after(_REMOVE_S, shield=True):
                    await remove_prepared(pool)

            parts.push_async_callback(remove_snapshots)  # the server of the sandboxes keeps them
        if judge is not None:
            from envkit.wiring.judge import open_judge

            found = replace(found, judge=await parts.enter_async_context(open_judge(judge)))
        yield found


async def _stop_without_parent(scope: anyio.CancelScope) -> None:
    stdin = sys.stdin.fileno()
    mode = os.fstat(stdin).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return  # a terminal, a file or /dev/null is not closed when the parent ends
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
    parser.add_argument("--sandboxes", metavar="URL", help="server of the sandboxes for environments")
    parser.add_argument("--judge", metavar="MODEL@URL", help="language model that grades answers")
    options = parser.parse_args(arguments)
    if options.capacity < 1:
        parser.error("--capacity must be at least 1")
    try:
        clock.run(serve_inside, options.socket, options.capacity, options.sandboxes, options.judge)
    except UsageError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
