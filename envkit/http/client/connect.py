"""Connectors: functions that open a client's WebSocket, to a URL or over a connected stream socket."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import anyio
from websockets.asyncio.client import ClientConnection, connect, unix_connect

from envkit.errors import UnreachableError, UsageError, from_problem
from envkit.http.protocol.messages import SOCKET_PATH
from envkit.http.sandboxes.byte_relay import UPGRADE

Connector: TypeAlias = Callable[[], Awaitable[ClientConnection]]
OpenSocket: TypeAlias = Callable[[], Awaitable[socket.socket]]

CONNECT_TIMEOUT_S = 10.0
"""Timeout of connecting, in seconds. If the timeout of calls is shorter, it also applies to connecting."""

_MAX_ANSWER_BYTES = 64 << 20
_PIECE = 1 << 14
_REST_S = 0.001
_PING_S = 20.0
_PONG_S = 120.0
"""Seconds to wait for a pong. This is long, because environments may compute in the server's event loop."""
_PLACEHOLDER_HOST = "ws://server"
_SCHEMES = {"http": "ws", "https": "wss"}


def url_connector(
    url: str, timeout_s: float, *, token: str | None = None, ca: Path | str | None = None, path: str = SOCKET_PATH
) -> Connector:
    """Return a connector that opens a WebSocket to the server at `url`.

    Args:
        url: Address of a server, such as ``"http://127.0.0.1:8000"`` or ``"unix:/tmp/env.sock"``.
        timeout_s: Timeout of a call, in seconds; see `CONNECT_TIMEOUT_S`.
        token: Token for the server; None sends no token.
        ca: PEM file with the certificates to trust; None: those of the system.
        path: Path of the WebSocket on the server.

    Raises:
        UsageError: `url` is not the address of a server, `token` is invalid, or the file `ca` cannot be used.
    """
    settings = {**_settings(timeout_s), "additional_headers": authorization_headers(token)}
    invalid = UsageError(f"{url!r} is not a server address, such as http://127.0.0.1:8000 or unix:/tmp/env.sock")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise invalid from None
    if parts.scheme == "unix" and parts.path:
        return lambda: unix_connect(parts.path, _PLACEHOLDER_HOST + path, **settings)
    if parts.scheme not in _SCHEMES or not parts.netloc:
        raise invalid
    if ca is not None:
        if parts.scheme != "https":
            raise UsageError(f"ca={ca} needs an https:// address, got {url}")
        settings["ssl"] = trusted_context(ca)
    target = f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path}{path}"
    return lambda: connect(target, **settings)


def socket_connector(open_socket: OpenSocket, timeout_s: float) -> Connector:
    """Return a connector that calls `open_socket`, and opens a WebSocket over the stream socket that it returns."""
    settings = _settings(timeout_s)

    async def connect_socket() -> ClientConnection:
        with anyio.fail_after(settings["open_timeout"]):
            connected = await open_socket()
        try:
            return await connect(_PLACEHOLDER_HOST + SOCKET_PATH, sock=connected, **settings)
        except BaseException:
            connected.close()
            raise

    return connect_socket


async def connect_bytes(url: str, path: str, timeout_s: float, *, token: str | None) -> socket.socket:
    """Return a non-blocking socket that a server without TLS connects to what `path` names.

    See `envkit.http.sandboxes.byte_relay`.

    Raises:
        UnreachableError: The server does not answer.
        EnvkitError: The server refused the connection with this error.
    """
    parts, loop = urlsplit(url), asyncio.get_running_loop()
    head = f"GET {path} HTTP/1.1\r\nHost: {parts.netloc or 'node'}\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in authorization_headers(token).items())
    stream: socket.socket | None = None
    try:
        with anyio.fail_after(min(timeout_s, CONNECT_TIMEOUT_S)):
            address: Any = parts.path
            if parts.scheme == "unix":
                stream = socket.socket(socket.AF_UNIX)
            else:
                found = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
                family, kind, protocol, _, address = found[0]
                stream = socket.socket(family, kind, protocol)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setblocking(False)
            await loop.sock_connect(stream, address)
            await loop.sock_sendall(stream, head.encode() + b"\r\n")
            answer = await _head(stream)
            if answer.startswith(b"HTTP/1.1 101 "):
                return stream
            size = re.search(rb"\r\ncontent-length: (\d+)", answer, re.IGNORECASE)
            body = b""
            while size is not None and len(body) < int(size[1]) and (piece := await loop.sock_recv(stream, _PIECE)):
                body += piece
            raise from_problem(json.loads(body or b"{}"))
    except (OSError, ValueError) as error:  # OSError includes TimeoutError
        if stream is not None:
            stream.close()
        raise UnreachableError(f"{url} does not answer: {str(error) or 'timeout'}") from None
    except BaseException:
        if stream is not None:
            stream.close()
        raise


async def _head(stream: socket.socket) -> bytes:
    """Read the head of an HTTP response, and no byte of what follows."""
    while True:
        await anyio.wait_readable(stream)
        seen = stream.recv(_PIECE, socket.MSG_PEEK)
        head, end, _ = seen.partition(b"\r\n\r\n")
        if end:
            return stream.recv(len(head) + len(end))
        if not seen or len(seen) == _PIECE:
            raise ConnectionResetError("it closed the connection")
        await anyio.sleep(_REST_S)  # the rest has not arrived yet


def authorization_headers(token: str | None) -> dict[str, str]:
    """Return the HTTP headers that send `token` to a server; no headers if `token` is None.

    Raises:
        UsageError: `token` is empty or contains characters that a header must not contain.
    """
    if token is None:
        return {}
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("invalid token: it is empty or contains spaces, line breaks or non-ASCII characters")
    return {"Authorization": f"Bearer {token}"}


def read_token(file: Path, warn: Callable[[str], None]) -> str:
    """Return the token that a file contains. Call `warn` with one line if other users can read the file.

    Raises:
        UsageError: The file cannot be read, or contains no token.
    """
    try:
        if file.stat().st_mode & 0o044:
            warn(f"other users can read the token file {file}; run: chmod go-rwx {file}")
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read a token from {file}: {error}") from None
    authorization_headers(token)
    return token


def trusted_context(ca: Path | str | None) -> ssl.SSLContext:
    """Return an SSL context that trusts only the certificates of a PEM file; None: those of the system.

    Raises:
        UsageError: The file cannot be read or contains no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # includes ssl.SSLError
        cause = "it contains no certificate" if isinstance(error, ssl.SSLError) else error.strerror
        raise UsageError(f"cannot read certificates from {ca}: {cause}") from None


def _settings(timeout_s: float) -> dict[str, Any]:
    return {
        "compression": None,
        "max_size": _MAX_ANSWER_BYTES,
        "open_timeout": min(timeout_s, CONNECT_TIMEOUT_S),
        "ping_interval": _PING_S,
        "ping_timeout": _PONG_S,
        "proxy": None,
    }
