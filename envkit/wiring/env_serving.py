"""Serving every registered environment from slots in this process."""

from __future__ import annotations

from collections.abc import Callable

from envkit.http.api.app import create_app
from envkit.http.server.middleware import Guard
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
        port: TCP port; 0 takes a free one.
        uds: Path of a Unix socket to listen on instead.
        capacity: Number of episodes at once.
        ttl_s: Seconds without a call after which a session expires.
        step_timeout_s: Seconds after which a step is cancelled and its session is broken.
        on_ready: Called once with the address, as soon as requests are answered.
        lazy: Start fast: prepare what only a person asks for when one does.
        sends_traces: Send callers the tracebacks of environments.

    Raises:
        UsageError: The port or the path cannot be used; the message says what to do.
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
        await serve(Guard(app) if uds is None else app, host=host, port=port, uds=uds, on_ready=on_ready)
