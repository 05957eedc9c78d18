"""``envkit serve``: environments and sandboxes over HTTP."""

from __future__ import annotations

import gc
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from envkit.cli.tables import echo, note
from envkit.errors import UsageError


def serve(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Server file in YAML (docs/serve-config.md).")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the file; repeatable.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="local (bubblewrap), docker, process (no isolation), nodes (on other machines only), or none "
            "(environments in this process, no sandboxes). By default local if it works, otherwise process.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name or address to listen on.  [default: 127.0.0.1]", show_default=False),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, metavar="PORT", help="Port; 0 picks a free one.  [default: 8000]", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Language model that clients call under /v1, or NAME@URL of a vLLM server."),
    ] = None,
    drain_s: Annotated[
        float | None,
        typer.Option(
            "--drain",
            min=0,
            metavar="SECONDS",
            help="At the end, wait this long for running episodes, and leave sandboxes to the next server.  "
            "[default: 0]",
            show_default=False,
        ),
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Listen on a Unix socket instead of host and port.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for leases and tokens.  [default: ~/.local/state/envkit]"),
    ] = None,
    node: Annotated[
        bool, typer.Option("--node", help="Only run sandboxes, for the server that lists this node or that it joins.")
    ] = False,
    join: Annotated[
        str | None, typer.Option(metavar="URL", help="With --node: join the server at this address.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --join: file with a token of that server (scope node). With --node alone: file with the token "
            "that the server must send.",
        ),
    ] = None,
) -> None:
    """Serve environments and sandboxes over HTTP.

    Prints "ready" and the address when it accepts requests. Ctrl-C finishes the running requests, stops the server and
    ends its sandboxes; with --drain, a second Ctrl-C ends the wait.
    """
    if not node and (join is not None or token_file is not None):
        raise UsageError("--join and --token-file are options of a node; add --node, or leave them out")
    from envkit import clock
    from envkit.config import serving
    from envkit.http.server.logs import events_on_standard_error
    from envkit.wiring.gateway.gateway import serve_fleet
    from envkit.wiring.gateway.node_server import serve_node

    options: dict[str, Any] = {
        "backend": backend,
        "listen.host": host,
        "listen.port": port,
        "listen.socket": None if socket is None else str(socket),
        "model": model,
        "drain_s": drain_s,
        "state": None if state is None else str(state),
    }
    merged = serving.read(config, settings or [], {key: value for key, value in options.items() if value is not None})
    if node:
        serve_it = partial(serve_node, merged, join=join, token_file=token_file, announce=note, on_ready=_ready)
    else:
        serve_it = partial(serve_fleet, merged, announce=note, on_ready=_ready)
    with events_on_standard_error():
        clock.run(serve_it, fast=True)
    for number in (signal.SIGTERM, signal.SIGINT):  # a signal that arrives after the end must not change the exit code
        signal.signal(number, signal.SIG_IGN)


def _ready(address: str) -> None:
    # Exclude the objects created so far from garbage collection, which would block requests for 0.15 s.
    gc.freeze()
    echo(f"ready {address}")
