"""Large transfers of the client: HTTP requests, each over its own connection."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from envkit.errors import EnvkitError, UnreachableError, from_problem
from envkit.http.client.connect import CONNECT_TIMEOUT_S, authorization_headers, trusted_context

_PROBLEM = msgspec.json.Decoder(dict[str, Any])


class HttpTransfers:
    """Makes HTTP requests to one server. The arguments are those of `envkit.http.client.connect.url_connector`."""

    def __init__(self, url: str, token: str | None = None, ca: Path | str | None = None) -> None:
        parts = urlsplit(url)
        self._url = url
        self._socket = parts.path if parts.scheme == "unix" else None
        self._base = "http://server" if self._socket else url
        self._is_tls = parts.scheme == "https"
        self._headers = {**authorization_headers(token), "Accept-Encoding": "identity"}
        self._ca = ca

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
        base = httpx.URL(self._base)
        url = base.copy_with(raw_path=base.raw_path.rstrip(b"/") + target.encode())
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        transport = httpx.AsyncHTTPTransport(verify=self._trusted(), uds=self._socket)
        try:
            async with (
                httpx.AsyncClient(transport=transport, headers=self._headers, timeout=timeout) as client,
                client.stream(verb, url, content=content, headers=headers) as response,
            ):
                if not response.is_success:
                    raise self._error(response.status_code, await response.aread())
                yield response
        except httpx.RequestError as error:
            raise UnreachableError(f"{self._url}: {str(error) or type(error).__name__}") from None

    def _trusted(self) -> ssl.SSLContext | bool:
        if not self._is_tls:
            return False
        return ssl.create_default_context() if self._ca is None else trusted_context(self._ca)

    def _error(self, status: int, content: bytes) -> EnvkitError:
        try:
            return from_problem(_PROBLEM.decode(content))
        except (ValueError, RecursionError):
            return UnreachableError(f"{self._url}: status {status}; check that an envkit server runs there")
