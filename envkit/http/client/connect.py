"""How a client connects: to an address, or through a socket that it is handed."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import anyio
from websockets.asyncio.client import ClientConnection, connect, unix_connect

from envkit.errors import UsageError
from envkit.http.protocol.messages import SOCKET_PATH

Dial: TypeAlias = Callable[[], Awaitable[ClientConnection]]
OpenSocket: TypeAlias = Callable[[], Awaitable[socket.socket]]

CONNECT_TIMEOUT_S = 10.0
"""Seconds that connecting may take, where a call may take longer."""

_MAX_ANSWER_BYTES = 64 << 20
_PING_S = 20.0
_PONG_S = 120.0
"""A server whose worlds compute in the loop's own thread is deaf for a while."""
_ANY_HOST = "ws://server"
_SCHEMES = {"http": "ws", "https": "wss"}


def dial_url(url: str, timeout_s: float, *, token: str | None = None, ca: Path | str | None = None) -> Dial:
    """Return how to connect to `url`.

    Args:
        url: Address of a server.
        timeout_s: Seconds that a call may take; connecting takes no longer than that.
        token: What to show there.
        ca: PEM file of the certificates to trust instead of the system's.

    Raises:
        UsageError: It is not the address of a server, or the token or the file cannot be used.
    """
    settings = {**_settings(timeout_s), "additional_headers": authorization(token)}
    wrong = UsageError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000 or unix:/tmp/env.sock")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme == "unix" and parts.path:
        return lambda: _opened(unix_connect(parts.path, _ANY_HOST + SOCKET_PATH, **settings))
    if parts.scheme not in _SCHEMES or not parts.netloc:
        raise wrong
    if ca is not None:
        if parts.scheme != "https":
            raise UsageError(f"the certificates in {ca} go with an https:// address, not with {url}")
        settings["ssl"] = trusting(ca)
    target = f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path}{SOCKET_PATH}"
    return lambda: _opened(connect(target, **settings))


def dial_socket(open_socket: OpenSocket, timeout_s: float) -> Dial:
    """Return how to connect through a socket that somebody else connects."""
    settings = _settings(timeout_s)

    async def dial() -> ClientConnection:
        with anyio.fail_after(settings["open_timeout"]):
            connected = await open_socket()
        try:
            return await connect(_ANY_HOST + SOCKET_PATH, sock=connected, **settings)
        except BaseException:
            connected.close()
            raise

    return dial


async def _opened(connecting: connect) -> ClientConnection:
    return await connecting


def authorization(token: str | None) -> dict[str, str]:
    """Return the headers that show `token`.

    Raises:
        UsageError: It cannot be one.
    """
    if token is None:
        return {}
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("the token is not one: it is empty, or has blanks, line ends or odd characters in it")
    return {"Authorization": f"Bearer {token}"}


def trusting(ca: Path | str) -> ssl.SSLContext:
    """Return a context that trusts the certificates of a PEM file alone.

    Raises:
        UsageError: They cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # an ssl.SSLError is one
        cause = "it holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
        raise UsageError(f"no certificates can be read from {ca}: {cause}") from None


def distrust(error: ssl.SSLError) -> str:
    """Return what to do about a certificate that is not trusted, for the end of a message."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return ""
    return f" ({error.verify_message}); ca names a file of certificates to trust"


def _settings(timeout_s: float) -> dict[str, Any]:
    return {
        "compression": None,
        "max_size": _MAX_ANSWER_BYTES,
        "open_timeout": min(timeout_s, CONNECT_TIMEOUT_S),
        "ping_interval": _PING_S,
        "ping_timeout": _PONG_S,
        "proxy": None,
    }
