"""A server behind the auth middleware, and its tenants' clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import httpx
from websockets.asyncio.client import ClientConnection, connect

from envkit import clock
from envkit.http.api.app import create_app
from envkit.http.auth.tokens import TokenStore
from envkit.http.server.middleware import AuthMiddleware
from envkit.types import Task
from tests.http.envs import listening, slots
from tests.http.pools import pool_of
from tests.http.remote_sandboxes import scripted

COUNT = {"env_id": "Count-v0", "seed": 7}
LONG = Task("Count-v0", 1, {"end": 10_000})


@dataclass
class Stage:
    """A running server, its tokens, and clients of it."""

    address: str
    tokens: TokenStore
    http: httpx.AsyncClient

    def token(self, tenant: str = "acme", scopes: str = "play", **more: Any) -> str:
        return self.tokens.create(tenant, scopes.split(","), **more)

    async def ask(self, verb: str, path: str, token: str | None = None, **more: Any) -> httpx.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return await self.http.request(verb, path, headers={**headers, **more.pop("headers", {})}, **more)


OnStage: TypeAlias = Callable[[Stage], Awaitable[None]]


@asynccontextmanager
async def guarded(
    folder: Path,
    *,
    ttl_s: float = 600,
    has_tokens: bool = True,
    has_sandboxes: bool = False,
    fresh_s: float = 0.05,
    tenant_share: float = 1.0,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """Serve for the duration of the block, with scripted sandboxes; `settings` are those of the middleware."""
    tokens = TokenStore(folder / "tokens.sqlite", fresh_s=fresh_s)
    async with slots(8) as host, scripted() as backend, pool_of(backend) as lent:
        if has_tokens:
            tokens.create("first", ["metrics"])  # from now on every caller needs one
        app = create_app(host, ttl_s=ttl_s, tenant_share=tenant_share, pool=lent if has_sandboxes else None)
        guard = AuthMiddleware(app, tokens, errors=app.errors, **settings)
        async with (
            listening(guard) as address,
            httpx.AsyncClient(base_url=address, trust_env=False) as client,
        ):
            yield Stage(address, tokens, client)


def on_stage(main: OnStage, folder: Path, **settings: Any) -> None:
    """Run `main` with a server; see `guarded`."""

    async def run() -> None:
        with anyio.fail_after(30):
            async with guarded(folder, **settings) as stage:
                await main(stage)

    clock.run(run)


async def open_socket(stage: Stage, headers: dict[str, str]) -> ClientConnection:
    """Open a WebSocket with `headers`."""
    host = headers.get("Host", stage.address.removeprefix("http://"))
    more = {name: value for name, value in headers.items() if name != "Host"}
    port = int(stage.address.rpartition(":")[2])
    return await connect(f"ws://{host}/v1/ws", host="127.0.0.1", port=port, additional_headers=more, proxy=None)
