"""``envkit serve``: environments over HTTP."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    capacity: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 1024,
    ttl_s: Annotated[float, typer.Option(min=1, help="Seconds after which an unused session ends.")] = 600.0,
) -> None:
    """Serve every registered environment over HTTP until Ctrl-C."""
    from envkit import clock
    from envkit.wiring.serve import serve_envs

    clock.run(partial(serve_envs, host, port, capacity=capacity, ttl_s=ttl_s, on_ready=_ready))


def _ready(url: str) -> None:
    print(f"ready {url}", flush=True)
