"""The routes of a server's language model, which are those of OpenAI and Anthropic. A process of its own answers them.

A request is forwarded over a Unix socket, with the caller's tenant as its API key.
"""

from __future__ import annotations

from typing import Self

import anyio
import httpx

from envkit import clock
from envkit.errors import UnreachableError
from envkit.http.auth.caller import caller_of
from envkit.http.protocol.asgi import Receive, Scope, Send, cancel_on_disconnect, read_body

MAX_BYTES = 32 << 20
"""Maximum size of a request's body."""
_HEADERS = frozenset((b"content-type", b"content-encoding", b"idempotency-key", b"x-stainless-retry-count"))
"""Headers of a request that the model's process needs."""
_GIVEN = frozenset(("content-type", "content-length"))
"""Headers of its answer that the caller gets."""


class ModelRoutes:
    """Forwards requests to the model's process. Use it with ``async with``.

    Args:
        socket: Path of the Unix socket on which the process answers.

    Attributes:
        why_down: Why the process does not answer; empty while it does.
    """

    def __init__(self, socket: str) -> None:
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://model", timeout=None)
        self.why_down = "it is loading"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def is_answered(self) -> bool:
        """Return whether the process answers a request that needs no sampling."""
        try:
            return (await self._client.get("/")).is_success
        except httpx.HTTPError:
            return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises `UnreachableError` if the process does not answer, and the errors of `read_body`."""
        content = await read_body(scope, receive, MAX_BYTES)
        headers = [(name, value) for name, value in scope["headers"] if name in _HEADERS]
        headers.append((b"authorization", f"Bearer {caller_of(scope).tenant or '-'}".encode()))
        request = self._client.build_request(scope["method"], scope["path"], content=content, headers=headers)
        async with clock.background_tasks() as tasks:
            with anyio.CancelScope() as connected:
                tasks.start_soon(cancel_on_disconnect, receive, connected)
                await self._forward(request, send)

    async def _forward(self, request: httpx.Request, send: Send) -> None:
        has_begun = False
        try:
            answer = await self._client.send(request, stream=True)
            try:
                headers = [(name.encode(), value.encode()) for name, value in answer.headers.items() if name in _GIVEN]
                await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                has_begun = True
                async for piece in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            if has_begun:  # the connection ends, so that the caller sees that the answer is not whole
                raise OSError("the model's process ended") from error
            why = self.why_down or f"its process does not answer ({type(error).__name__})"
            raise UnreachableError(f"the model of this server is not available: {why}; retry later") from None
