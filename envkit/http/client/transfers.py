"""Large transfers of the client: HTTP requests, each over its own connection.

Each request runs in a thread, because the HTTP client of the standard library blocks. A cancellation shuts the
connection of the request down, because the thread itself cannot be interrupted.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio.lowlevel import checkpoint_if_cancelled

from envkit import clock
from envkit.errors import EnvkitError, UnreachableError, from_problem
from envkit.http.client.connect import CONNECT_TIMEOUT_S, authorization_headers, trusted_context

_PIECE_BYTES = 1 << 20
_PROBLEM = msgspec.json.Decoder(dict[str, Any])

T = TypeVar("T")


class HttpTransfers:
    """Makes HTTP requests to one server.

    Args:
        url: Address of the server, as for `envkit.http.client.connect.url_connector`.
        token: Token for the server; None sends no token.
        ca: PEM file with the certificates to trust; None: those of the system.
    """

    def __init__(self, url: str, token: str | None = None, ca: Path | str | None = None) -> None:
        self._url = url
        self._parts = urlsplit(url)
        self._headers = authorization_headers(token)
        self._ca = ca

    async def request(
        self, verb: str, target: str, body: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Make a request that is safe to repeat; return the body of the answer. Retry once if the connection breaks.

        Raises:
            UnreachableError: The server is unreachable, or its answer is invalid.
            EnvkitError: The server answered with this error.
        """
        try:
            return await self._request(verb, target, body, timeout_s, headers or {})
        except UnreachableError:
            return await self._request(verb, target, body, timeout_s, headers or {})

    async def send(self, verb: str, target: str, pieces: AsyncIterator[bytes], *, timeout_s: float) -> None:
        """Make a request whose body is streamed from `pieces`. Raises the same errors as `request`, and those of
        `pieces`.
        """
        async with _HttpExchange(self, timeout_s) as exchange:
            await exchange.start(verb, target, {"Transfer-Encoding": "chunked"})
            try:
                async for piece in pieces:
                    if piece:
                        await exchange.send(b"%x\r\n%b\r\n" % (len(piece), piece))
                await exchange.send(b"0\r\n\r\n")
            except UnreachableError:
                # The server may have rejected the request and closed the connection before it read the whole body.
                if (refusal := await exchange.refusal()) is None:
                    raise
                raise refusal from None
            await exchange.answer()

    async def pieces(self, target: str, *, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """Make a GET request and yield the body of the answer in pieces. Raises the same errors as `request`."""
        async with _HttpExchange(self, timeout_s) as exchange:
            await exchange.start("GET", target, {})
            response = await exchange.response()
            while piece := await exchange.run(response.read, _PIECE_BYTES):
                yield piece

    async def _request(
        self, verb: str, target: str, body: bytes, timeout_s: float, headers: Mapping[str, str]
    ) -> bytes:
        async with _HttpExchange(self, timeout_s) as exchange:
            await exchange.start(verb, target, {**headers, "Content-Length": str(len(body))})
            # Sending fails if the server answers and closes the connection before it has read the whole body.
            with suppress(UnreachableError):
                await exchange.send(body)
            return await exchange.answer()

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a new connection to the server. The connection is not open yet."""
        parts = self._parts
        if parts.scheme == "unix":
            return _UnixConnection(parts.path, timeout_s)
        assert parts.hostname is not None  # checked by `url_connector`
        if parts.scheme == "https":
            context = ssl.create_default_context() if self._ca is None else trusted_context(self._ca)
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)

    def path(self, target: str) -> str:
        """Return `target` with the path of the server's URL in front of it."""
        return target if self._parts.scheme == "unix" else f"{self._parts.path.rstrip('/')}{target}"

    @property
    def headers(self) -> Mapping[str, str]:
        return self._headers

    def unreachable(self, cause: object) -> UnreachableError:
        return UnreachableError(f"{self._url}: {cause}")


class _HttpExchange:
    """One HTTP request and its answer, over a connection of their own."""

    def __init__(self, transfers: HttpTransfers, timeout_s: float) -> None:
        self._transfers = transfers
        self._timeout_s = timeout_s
        self._connection = transfers.connect(min(timeout_s, CONNECT_TIMEOUT_S))
        self._is_waiting = False

    async def start(self, verb: str, target: str, headers: Mapping[str, str]) -> None:
        await self.run(self._start, verb, target, {**self._transfers.headers, **headers, "Connection": "close"})

    async def send(self, data: bytes) -> None:
        await self.run(self._connection.send, data)

    async def response(self) -> http.client.HTTPResponse:
        """Wait for the head of the response; return the response, whose body the caller reads.

        Raises:
            EnvkitError: The server answered with this error.
        """
        response = await self.run(self._connection.getresponse)
        if 200 <= response.status < 300:
            return response
        content = await self.run(response.read, _PIECE_BYTES)
        try:
            problem = from_problem(_PROBLEM.decode(content))
        except (ValueError, RecursionError):
            raise self._transfers.unreachable(
                f"status {response.status}; check that an envkit server runs there"
            ) from None
        raise problem

    async def answer(self) -> bytes:
        response = await self.response()
        return await self.run(response.read)

    async def refusal(self) -> EnvkitError | None:
        """Return the error that the server answered; None if the server sent no error."""
        try:
            await self.response()
        except UnreachableError:
            return None
        except EnvkitError as error:
            return error
        return None

    async def run(self, call: Callable[..., T], *args: object) -> T:
        """Run a blocking call of the connection in a thread. A cancellation shuts the connection down, so the call
        ends.
        """
        results: list[T] = []
        failure: Exception | None = None
        self._is_waiting = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._shut_down_when_cancelled)
            try:
                results.append(await clock.to_thread(call, *args))
            except (OSError, http.client.HTTPException) as error:
                # If a cancellation shut the connection down, raise the cancellation instead of this error.
                await checkpoint_if_cancelled()
                failure = error
            self._is_waiting = False
            tasks.cancel_scope.cancel()
        if failure is not None:
            text = getattr(failure, "strerror", None) or str(failure) or type(failure).__name__
            raise self._transfers.unreachable(text) from None
        return results[0]

    async def __aenter__(self) -> _HttpExchange:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connection.close()

    def _start(self, verb: str, target: str, headers: Mapping[str, str]) -> None:
        connection = self._connection
        connection.connect()
        assert connection.sock is not None
        connection.sock.settimeout(self._timeout_s)
        connection.putrequest(verb, self._transfers.path(target))
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()

    async def _shut_down_when_cancelled(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            if self._is_waiting and self._connection.sock is not None:
                with suppress(OSError):
                    self._connection.sock.shutdown(socket.SHUT_RDWR)


class _UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("server", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
