"""The connections of a client of sandboxes to a server: a WebSocket, HTTP requests, and byte streams."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import httpx
from anyio.abc import TaskGroup
from websockets.asyncio.client import ClientConnection

from envkit import clock
from envkit.errors import CapacityError, RateLimitError, UnreachableError, UnsupportedError
from envkit.http.client.connect import (
    CONNECT_TIMEOUT_S,
    authorization_headers,
    connect_bytes,
    trusted_context,
    url_connector,
)
from envkit.http.client.connection import SharedWebSocket, connect_once, refusal
from envkit.http.client.outages import Outages
from envkit.http.protocol.operations import KEY_HEADER, Operation, Q, R
from envkit.http.sandboxes.transfers import FolderTransport

CALL_S = 60.0
"""Timeout of a call that runs no program, in seconds."""

_RETRY_S = 60.0
"""Seconds for which a call is retried while the server lacks capacity for it, or a limit rejects it."""

_FIRST_DELAY_S, _MAX_DELAY_S = 0.02, 1.0
"""Backoff: seconds before the first of these retries, and the maximum before a later one."""

T = TypeVar("T")


class SandboxTransport:
    """The connections of a client to a server: one WebSocket that all calls share, and HTTP for large transfers.

    The arguments are those of `envkit.http.client.sandbox_client.SandboxClient`.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        ca: Path | str | None,
        folder_transport: FolderTransport | None,
        outages: Outages,
    ) -> None:
        self.address = url.rstrip("/")
        self.websocket = SharedWebSocket(self.address, url_connector(self.address, CALL_S, token=token, ca=ca))
        parts = urlsplit(self.address)
        self._socket = parts.path if parts.scheme == "unix" else None
        self.tasks: TaskGroup | None = None
        """Runs the tasks that copy the bytes of open connections; None while the client is not connected."""
        self._token = token
        self._ca = ca
        self._folder_transport = folder_transport
        self._outages = outages
        self._rng = random.Random()

    @property
    def folder_transport(self) -> FolderTransport:
        """Object that packs and unpacks folders; raises `UnsupportedError` if the client was created without one."""
        if self._folder_transport is None:
            raise UnsupportedError("cannot copy folders: this client was created without a folder transport; pass one")
        return self._folder_transport

    async def call(self, operation: Operation[Q, R], request: Q, timeout_s: float = CALL_S) -> R:
        """Make a call over the WebSocket. Raises the error that the server answers."""
        return await self._outages.call(partial(self.websocket.call, operation, request, timeout_s))

    async def call_http(
        self, operation: Operation[Q, Any], request: Q, timeout_s: float, content: bytes | None = None
    ) -> bytes:
        """Make a call over HTTP, and return the body of the answer. Retry once if the connection breaks.

        `content` is the body of the HTTP request; None sends those fields of `request` that belong in the body as JSON.
        """
        key, target = getattr(request, "key", None), operation.target(request)
        headers = {"Content-Type": operation.takes, **({} if key is None else {KEY_HEADER: key})}
        body = operation.content(request) if content is None else content

        async def send() -> bytes:
            async with self.exchange(operation.verb, target, timeout_s, body, headers) as response:
                return await response.aread()

        async def send_twice() -> bytes:
            try:
                return await send()
            except UnreachableError:
                return await send()

        return await self._outages.call(send_twice)

    async def open_stream(self, operation: Operation[Q, Any], request: Q) -> ClientConnection:
        """Open the byte stream of an operation; see `envkit.http.sandboxes.streams`. The caller closes it."""
        path = operation.target(request)
        connector = url_connector(self.address, CALL_S, token=self._token, ca=self._ca, path=path)
        return await self._outages.call(partial(connect_once, connector, self.address))

    async def open_bytes(self, operation: Operation[Q, Any], request: Q) -> socket.socket:
        """Open the byte stream of an operation of a node without TLS; see `envkit.http.sandboxes.byte_relay`.

        Raises:
            UnreachableError: The node does not answer, or nothing listens in the sandbox.
        """
        return await connect_bytes(self.address, operation.target(request), CALL_S, token=self._token)

    async def with_retries(self, call: Callable[[], Awaitable[T]], retry_s: float = _RETRY_S) -> T:
        """Make a call. Repeat it for up to `retry_s` seconds while it exceeds a capacity or limit of the server.

        A rejected call has not started, so repeating it is safe.
        """
        until, delay_s = clock.now() + retry_s, _FIRST_DELAY_S
        while True:
            try:
                return await call()
            except (CapacityError, RateLimitError) as error:
                wait_s = error.wait_s if isinstance(error, RateLimitError) else 0.0
                if clock.now() + max(wait_s, delay_s) > until:
                    raise
                await anyio.sleep(max(wait_s, delay_s * self._rng.uniform(0.5, 1.0)))  # jitter
                delay_s = min(2 * delay_s, _MAX_DELAY_S)

    @asynccontextmanager
    async def exchange(
        self,
        verb: str,
        target: str,
        timeout_s: float,
        content: bytes | AsyncIterator[bytes] = b"",
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request, and wait for the head of the response, whose body the block reads. `content` may be streamed.

        Raises:
            UnreachableError: The server is unreachable, or its answer is invalid.
            EnvkitError: The server answered with this error.
        """
        base = httpx.URL("http://server" if self._socket else self.address)
        url = base.copy_with(raw_path=base.raw_path.rstrip(b"/") + target.encode())
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        verify = trusted_context(self._ca) if base.scheme == "https" else False
        transport = httpx.AsyncHTTPTransport(verify=verify, uds=self._socket)
        own = {**authorization_headers(self._token), "Accept-Encoding": "identity"}
        try:
            async with (
                httpx.AsyncClient(transport=transport, headers=own, timeout=timeout) as client,
                client.stream(verb, url, content=content, headers=headers) as response,
            ):
                if not response.is_success:
                    raise refusal(response.status_code, await response.aread(), self.address)
                yield response
        except httpx.RequestError as error:
            raise UnreachableError(f"{self.address}: {str(error) or type(error).__name__}") from None
