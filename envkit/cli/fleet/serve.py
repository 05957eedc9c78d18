"""``envkit serve``: environments and sandboxes over HTTP."""

from __future__ import annotations

import gc
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from envkit.errors import UsageError


def serve(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file of the fleet (docs/serve-config.md).")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another value for a key of the file.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="local (bubblewrap), docker, process, ray, or none: environments alone, in this process. "
            "The default is local where it works, otherwise process.",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name or address to listen on (127.0.0.1).", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", help="0 takes a free one (8000).", show_default=False),
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(min=1, metavar="COUNT", help="Episodes at once (1024).", show_default=False)
    ] = None,
    ttl_s: Annotated[
        float | None,
        typer.Option(
            min=1, metavar="SECONDS", help="How long a session lives that nobody uses (600).", show_default=False
        ),
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Listen on a Unix socket instead of host and port.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where leases and tokens are kept (~/.local/state/envkit).")
    ] = None,
    inside: Annotated[
        bool, typer.Option("--inside", help="Be the server inside a sandbox: on a socket, and quick to start.")
    ] = False,
) -> None:
    """Serve every registered environment, and sandboxes, over HTTP.

    Prints one line, ready and the address, as soon as it answers. Ctrl-C ends it after the calls that run, and every
    sandbox with it.
    """
    from envkit import clock

    if inside:
        if socket is None:
            raise UsageError("--inside needs --socket: a sandbox has no network")
        from envkit.wiring.env_server import serve_envs

        clock.run(
            partial(serve_envs, uds=str(socket), capacity=capacity or 1024, on_ready=_ready, lazy=True), fast=True
        )
        return
    from envkit.config import serving
    from envkit.http.server.stderr_log import StandardErrorLog
    from envkit.wiring.gateway.gateway import serve_fleet

    options: dict[str, Any] = {
        "backend": backend,
        "listen.host": host,
        "listen.port": port,
        "listen.socket": None if socket is None else str(socket),
        "envs.capacity": capacity,
        "limits.session_ttl_s": ttl_s,
        "state": None if state is None else str(state),
    }
    wanted = serving.read(config, settings or [], {key: value for key, value in options.items() if value is not None})
    with StandardErrorLog():
        clock.run(partial(serve_fleet, wanted, announce=_announce, on_ready=_ready), fast=True)
    for number in (signal.SIGTERM, signal.SIGINT):  # all is over but our own exit, whose code is to be the true one
        signal.signal(number, signal.SIG_IGN)


def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ready(address: str) -> None:
    # All that was made until now stays. A look at all of it would take 0.15 s, in which nobody would be answered.
    gc.freeze()
    print(f"ready {address}", flush=True)
