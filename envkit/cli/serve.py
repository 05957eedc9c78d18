"""``envkit serve``: environments over HTTP."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from envkit.errors import UsageError


def serve(
    host: Annotated[str, typer.Option(metavar="NAME", help="Name or address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="0 takes a free one.")] = 8000,
    capacity: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Episodes at once.")] = 1024,
    ttl_s: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long a session lives that nobody uses.")
    ] = 600.0,
    socket: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Listen on a Unix socket instead of host and port.")
    ] = None,
    inside: Annotated[
        bool, typer.Option("--inside", help="Be the server inside a sandbox: on a socket, and quick to start.")
    ] = False,
) -> None:
    """Serve every registered environment over HTTP.

    Prints one line, ready and the address, as soon as it answers. Ctrl-C ends it after the calls that run.
    """
    if inside and socket is None:
        raise UsageError("--inside needs --socket: a sandbox has no network")
    from envkit import clock
    from envkit.wiring.serve import serve_envs

    clock.run(
        partial(
            serve_envs,
            host=host,
            port=port,
            uds=None if socket is None else str(socket),
            capacity=capacity,
            ttl_s=ttl_s,
            on_ready=_ready,
            lazy=inside,
        ),
        fast=True,
    )


def _ready(address: str) -> None:
    print(f"ready {address}", flush=True)
