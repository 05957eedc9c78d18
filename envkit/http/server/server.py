"""Serve an `App` with uvicorn, on TCP or a Unix socket, inside the caller's event loop."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from errno import EADDRINUSE
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from envkit.errors import UsageError
from envkit.http.protocol.messages import MAX_MESSAGE_BYTES
from envkit.http.sandboxes.byte_relay import EXTENSION
from envkit.http.server.middleware import Served

DRAIN_S = 10.0
"""Default seconds that running calls have to finish when the server shuts down."""

MAX_CONNECTIONS = 10_000
"""Default limit on concurrent connections."""

_FILES = 1 << 16
"""Highest limit on open files that the server sets for itself.

A higher limit would slow down programs that inherit the limit and close every possible file descriptor.
"""

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_PING_S = 20.0
_PONG_S = 120.0
"""Seconds to wait for a pong. A client that trains in the thread of its event loop cannot answer during an update."""
_LEAVE_S = 3
_UVICORN = logging.getLogger("uvicorn.error")
_EXPECTED = frozenset(
    {
        "ASGI callable returned without completing handshake.",
        "ASGI callable returned without completing response.",
        "Exceeded concurrency limit.",
        "Invalid HTTP request received.",
        "Invalid UTF-8 sequence received from client.",
        "Unsupported upgrade request.",
    }
)


async def serve(
    app: Served,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: str | None = None,
    on_ready: Callable[[str], None] | None = None,
    handle_signals: bool = True,
    drain_s: float = DRAIN_S,
    on_drained: Callable[[], Awaitable[None]] | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    max_connections: int | None = None,
    byte_streams: bool = False,
) -> None:
    """Serve `app` until SIGTERM, SIGINT or a cancellation; then let running calls finish and release all leases.

    Args:
        app: Result of `envkit.http.api.app.create_app`, or an `AuthMiddleware` around it.
        host: Host name or address to listen on.
        port: TCP port to listen on; 0 for any free port.
        uds: Path of a Unix socket to listen on instead of the TCP port. A socket file of a server that no longer runs
            is replaced.
        on_ready: Called once, when the server accepts requests, with its address, such as ``"http://127.0.0.1:8000"``
            or ``"unix:/tmp/env.sock"``.
        handle_signals: Whether SIGTERM and SIGINT stop the server. This is only possible in the main thread.
        drain_s: Seconds that running calls have to finish when the server shuts down.
        on_drained: Called when the running calls have finished at the shutdown, before any lease is released.
        certificate: PEM file with a certificate and its chain; None for no TLS.
        key: PEM file with the private key of the certificate, without a password; None if `certificate` contains the
            key.
        max_connections: Maximum number of concurrent connections; further connections get status 503. None means
            `MAX_CONNECTIONS`, or half of this process's limit on open files if that is less.
        byte_streams: Whether requests may become plain connections; see `envkit.http.sandboxes.byte_relay`.

    Raises:
        UsageError: The port, the path or the certificate cannot be used; the message says what to do.
    """
    _check_certificate(certificate, key)
    max_connections = max_connections or min(MAX_CONNECTIONS, _raise_file_limit() // 2)
    _UVICORN.addFilter(_is_unexpected)
    received = anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) if handle_signals else nullcontext()
    with received as signals:  # before the socket exists, so that no signal is missed
        listener = _listen_tcp(host, port) if uds is None else _listen_unix(Path(uds))
        address = _address(listener, is_tls=certificate is not None)
        try:
            config = _config(app, max_connections, certificate, key)
            if byte_streams:
                config.http = _BytesProtocol

            async def drain() -> None:
                await app.drain(drain_s)
                if on_drained is not None:
                    await on_drained()

            server = _Server(config, lambda: on_ready(address) if on_ready else None, drain)
            async with anyio.create_task_group() as tasks:
                if signals is not None:
                    tasks.start_soon(server.stop_on, signals)
                tasks.start_soon(server.run_shielded, listener)
                try:
                    await server.stopping.wait()
                finally:
                    server.stopping.set()
                await server.ended.wait()
                tasks.cancel_scope.cancel()
        finally:
            _stop_listening(listener, uds)


def require_address(
    host: str, port: int, uds: str | None, certificate: Path | None = None, key: Path | None = None
) -> None:
    """Raise `UsageError` if a server cannot listen on this address, before anything starts; see `serve`."""
    _check_certificate(certificate, key)
    listener = _listen_tcp(host, port) if uds is None else _listen_unix(Path(uds))
    _stop_listening(listener, uds)


class _BytesProtocol(HttpToolsProtocol):
    """An HTTP connection that an application can take over, after which it is no HTTP connection any more."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"take": self._take}}

    def _take(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        end_protocol = protocol.connection_lost

        def connection_lost(error: Exception | None) -> None:
            end_protocol(error)
            self.connection_lost(error)  # uvicorn forgets the connection, and sends no response

        protocol.connection_lost = connection_lost  # type: ignore[method-assign, assignment]
        self.transport.set_protocol(protocol)
        return self.transport


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers. It stops when the event `stopping` is set, and does not poll a flag."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], drain: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self.stopping = anyio.Event()
        self.ended = anyio.Event()
        self._on_ready = on_ready
        self._drain = drain

    async def run_shielded(self, listener: socket.socket) -> None:
        """Serve until `stopping` is set. A cancellation does not interrupt this: the shutdown needs time."""
        with anyio.CancelScope(shield=True):
            try:
                await self.serve(sockets=[listener])
            finally:
                self.ended.set()

    async def stop_on(self, signals: AsyncIterator[signal.Signals]) -> None:
        async for _ in signals:
            self.stopping.set()

    async def main_loop(self) -> None:
        self._on_ready()
        await self.stopping.wait()
        await self._drain()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Whether to log a record of uvicorn: not invalid requests, aborted answers, and rejected WebSockets."""
    return record.msg not in _EXPECTED


def _config(app: Served, max_connections: int, certificate: Path | None, key: Path | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="websockets-sansio",
        limit_concurrency=max_connections,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        ssl_keyfile_password="" if certificate is not None else None,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=_PING_S,
        ws_ping_timeout=_PONG_S,
        ws_per_message_deflate=False,
        lifespan="on",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LEAVE_S,
        backlog=_BACKLOG,
    )


def _raise_file_limit() -> int:
    """Raise the limit on open files of this process to `_FILES`, or as far as allowed; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _FILES if soft == resource.RLIM_INFINITY else soft
    # Some systems refuse even the hard limit that they report. The old limit then stays.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raise `UsageError` if the certificate cannot be used; None needs no check."""
    if certificate is None:
        if key is not None:
            raise UsageError(f"the key {key} needs a certificate; pass the certificate too")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Pass an empty password, so that OpenSSL does not ask for one on the terminal if the key has a password.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        files = certificate if key is None else f"{certificate} with the key {key}"
        cause = (
            error.reason if isinstance(error, ssl.SSLError) else error.strerror if isinstance(error, OSError) else error
        )
        raise UsageError(f"cannot use the certificate {files} for TLS: {cause or error}") from None


def _listen_tcp(host: str, port: int) -> socket.socket:
    # Check the port here, because the resolver would silently use only its lower 16 bits.
    if not 0 <= port <= 65535:
        raise UsageError(f"invalid port {port}; use 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Pass the protocol number to the socket. Otherwise asyncio would not turn off Nagle's algorithm, which delays
        # replies by 40 ms.
        return _listen(socket.socket(family, kind, protocol), address)
    except OSError as error:
        if error.errno == EADDRINUSE:
            remedy = "is in use; choose another one, or 0 for any free port"
        else:
            remedy = f"cannot be used: {error.strerror or error}"
        raise UsageError(f"port {port} on {host} {remedy}") from None
    except UnicodeError:
        raise UsageError(f"{host[:80]!r} is not a host name") from None


def _listen_unix(path: Path) -> socket.socket:
    if path.is_socket():
        _remove_stale(path)
    elif path.exists():
        raise UsageError(f"{path} exists and is not a socket; choose another path")
    try:
        return _listen(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path))
    except OSError as error:
        raise UsageError(f"cannot create a socket at {path}: {error.strerror or error}") from None


def _listen(listener: socket.socket, address: tuple[Any, ...] | str) -> socket.socket:
    try:
        if listener.family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _stop_listening(listener: socket.socket, uds: str | None) -> None:
    listener.close()
    if uds is not None:
        Path(uds).unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise UsageError(f"{path} cannot be used: {error.strerror or error}") from None
    raise UsageError(f"a server already listens at {path}; stop it or choose another path")


def _address(listener: socket.socket, *, is_tls: bool) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
