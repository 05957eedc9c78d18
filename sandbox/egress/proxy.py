"""The HTTP proxy for the hosts that a sandbox may reach.

The sandbox has no network. The relay (`envkit.sandbox.egress.relay_inside`) runs inside the sandbox, where
``HTTP_PROXY`` and ``HTTPS_PROXY`` point at the relay. The proxy runs on the host, keeps idle connections to the relay
and serves the requests that arrive on them, if `envkit.sandbox.egress.allowlist` allows the target. HTTPS is tunnelled
(``CONNECT``) and not inspected, so an allowed server may forward data anywhere. A plain HTTP connection carries one
request, to the host in its request line; the proxy replaces the header ``Host``.

A second relay can connect the sandbox's programs to one service of this process, and to nothing else (`open_service`).
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import anyio

from envkit import clock
from envkit.errors import SandboxEndedError, SandboxLostError, UnreachableError
from envkit.protocols import Sandbox
from envkit.types import SandboxSpec

from ..agent_client.channel import SocketStream
from ..agent_client.sandbox import AgentSandbox
from ..host.instances import not_ready
from ..host.layout import SOCKETS
from .allowlist import Allowlist, RefusedError, Resolve, public_addresses

PORT = 3128
"""Port of the relay on 127.0.0.1 in the sandbox."""
SOCKET = "proxy"
"""File name of the relay's Unix socket in `SOCKETS`; the proxy connects to this socket."""

_ADDRESS = f"http://127.0.0.1:{PORT}"
VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _ADDRESS),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}
"""Environment variables that point the programs of a sandbox at the proxy."""

_WAIT = ("sh", "-c", f'until [ -S "$ENVKIT_SOCKETS/{SOCKET}" ]; do sleep 0.02; done; exec "$@"', "sh")
_IDLE_CONNECTIONS = 4
"""Number of idle connections to the relay that are kept open for the next clients."""
_AT_ONCE = 64
_HEAD_BYTES = 64 << 10
_HEAD_S = 10.0
_IDLE_S = 300.0
_LINGER_S = 30.0
"""Maximum number of seconds to send the rest of a response to the client after the server has sent all of it."""
_RETRY_S = 0.02
"""Seconds between the first attempts to connect to the relay; doubled after each attempt, up to `_RESTART_S`."""
_RESTART_S = 1.0
_FOR_EVER_S = 1e9
_SERVICE_PORTS = range(20_000, 60_000)
_SERVICE_START_S = 30.0
_SERVICE_PYTHON = "python3"
_END = b"\r\n\r\n"
_OWN_HEADERS = (b"connection", b"host", b"keep-alive", b"proxy-authorization", b"proxy-connection")
_INSIDE = Path(__file__).with_name("relay_inside.py")


def variables(spec: SandboxSpec) -> Mapping[str, str]:
    """Return `VARIABLES` if the network of `spec` is an allowlist, otherwise no variables."""
    return {} if isinstance(spec.network, str) else VARIABLES


def waiting(spec: SandboxSpec, command: Sequence[str]) -> tuple[str, ...]:
    """Return an argv that runs `command`; if `spec` has an allowlist, the argv first waits until the relay listens.

    If `command` is empty, return an empty argv.
    """
    return (*_WAIT, *command) if command and not isinstance(spec.network, str) else tuple(command)


async def open_for(
    sandbox: AgentSandbox, spec: SandboxSpec, python: str, *, resolve: Resolve = public_addresses
) -> None:
    """Start the relay in `sandbox` and the proxy on the host; both run until the sandbox ends.

    Does nothing if `spec` has no allowlist. If this function raises, it has stopped the sandbox.

    Args:
        sandbox: A sandbox that was started from `spec` without a network, with `VARIABLES` in its environment.
        spec: The specification of the sandbox.
        python: Path of the Python interpreter inside the sandbox.
        resolve: Receives a host name and a port; returns the addresses to which a connection is allowed.

    Raises:
        SandboxEndedError: The relay does not start, or the sandbox ended by itself before it was ready.
        SandboxStartError: The sandbox was lost for another reason.
    """
    if isinstance(spec.network, str):
        return
    sandbox.while_alive(_keep_relay(sandbox, python, SOCKET, PORT))
    try:
        with anyio.move_on_after(spec.start_timeout_s):
            (await _connected(sandbox, SOCKET)).close()
            sandbox.while_alive(serve(sandbox, Allowlist(spec.network, resolve)))
            return
    except SandboxLostError as error:
        await sandbox.stop()
        raise not_ready(sandbox.id, error.cause) from None
    except BaseException:
        await sandbox.stop()
        raise
    await sandbox.stop()
    raise SandboxEndedError(sandbox.id, f"the proxy relay at {_ADDRESS} in the sandbox did not start")


@asynccontextmanager
async def open_service(sandbox: Sandbox, connect: Callable[[], Awaitable[socket.socket]]) -> AsyncIterator[int]:
    """Let the programs of a sandbox with Python 3.8 or newer connect to a service during the block.

    `connect` returns a connected, non-blocking socket to the service.

    Yields:
        The port on 127.0.0.1 in the sandbox.

    Raises:
        SandboxEndedError: The relay does not start in the sandbox.
        SandboxLostError: The sandbox was lost.
    """

    async def answer(client: SocketStream, first: bytes) -> None:
        if not first:
            return
        with suppress(OSError):
            upstream = await SocketStream.open(await connect())
            try:
                await _join(client, upstream, first)
                await client.end()
            finally:
                upstream.close()

    # A random port, because sandboxes without isolation share the ports of the machine
    port = secrets.choice(_SERVICE_PORTS)
    name = f"service-{port}"
    async with clock.background_tasks() as tasks:
        tasks.start_soon(_keep_relay, sandbox, _SERVICE_PYTHON, name, port)
        with anyio.move_on_after(_SERVICE_START_S) as scope:
            (await _connected(sandbox, name)).close()
        if scope.cancelled_caught:
            raise SandboxEndedError(sandbox.id, f"the relay did not start in the sandbox; it needs {_SERVICE_PYTHON}")
        tasks.start_soon(_serve_relay, sandbox, name, answer)
        yield port


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A request to the proxy."""

    host: str
    port: int
    head: bytes

    @classmethod
    def parse(cls, head: bytes) -> ProxyRequest:
        """Parse `head`, which is the request line, the headers and the empty line after them.

        Raises:
            RefusedError: `head` is not a valid proxy request.
        """
        line, *headers = head.removesuffix(_END).split(b"\r\n")
        if any(part in one for one in (line, *headers) for part in (b"\r", b"\n", b"\0")):
            raise RefusedError(400, "not a request")  # Servers may treat a lone CR, LF or NUL as the end of a header.
        if any(one.startswith((b" ", b"\t")) for one in headers):
            # Servers read an indented line as part of the line before it, which may be a header that the proxy adds.
            raise RefusedError(400, "not a request")
        try:
            method, target, version = line.decode("ascii").split(" ")
            parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise RefusedError(400, "not a request") from None
        if not host or parts.username is not None or not version.startswith("HTTP/1."):
            raise RefusedError(400, "not a request to a proxy")
        if method == "CONNECT":
            return cls(host, 443 if port is None else port, b"")
        if parts.scheme != "http":
            raise RefusedError(400, f"{target[:100]} is refused; use http, or https by CONNECT")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        kept = [header for header in headers if header.partition(b":")[0].strip().lower() not in _OWN_HEADERS]
        own = [f"{method} {path} {version}".encode(), f"Host: {parts.netloc}".encode(), b"Connection: close"]
        return cls(host, 80 if port is None else port, b"\r\n".join([*own, *kept]) + _END)


async def serve(sandbox: Sandbox, allowlist: Allowlist) -> None:
    """Serve the HTTP requests from inside `sandbox` until it ends."""

    async def answer(client: SocketStream, first: bytes) -> None:
        with suppress(ConnectionError):
            try:
                head, rest = await _head(client, first)
                request = ProxyRequest.parse(head)
                upstream = await SocketStream.open(await allowlist.connect(request.host, request.port))
            except RefusedError as refusal:
                await client.send(_refusal(refusal))
            else:
                try:
                    if not request.head:
                        await client.send(b"HTTP/1.1 200 Connection established" + _END)
                    await _join(client, upstream, request.head + rest)
                finally:
                    upstream.close()
            with anyio.move_on_after(_LINGER_S):
                await client.end()
                while await client.receive():
                    pass

    await _serve_relay(sandbox, SOCKET, answer)


async def _serve_relay(sandbox: Sandbox, name: str, answer: Callable[[SocketStream, bytes], Awaitable[None]]) -> None:
    """Keep idle connections to the relay at the socket `name`, until the sandbox ends.

    `answer` serves each client that arrives on them; it gets the connection and the client's first bytes.
    """
    limit = anyio.CapacityLimiter(_AT_ONCE)
    async with anyio.create_task_group() as tasks:

        async def serve_connection() -> None:
            async with limit:
                try:
                    client = await SocketStream.open(await _connected(sandbox, name))
                except SandboxLostError:
                    tasks.cancel_scope.cancel()
                    return
                try:
                    first = await client.receive()
                    if not first:  # The relay has closed the connection. Do not reconnect in a busy loop.
                        await anyio.sleep(_RESTART_S)
                    tasks.start_soon(serve_connection)  # Open another idle connection in place of this one.
                    await answer(client, first)
                finally:
                    client.close()

        for _ in range(_IDLE_CONNECTIONS):
            tasks.start_soon(serve_connection)


async def _keep_relay(sandbox: Sandbox, python: str, name: str, port: int) -> None:
    """Run the relay inside a sandbox until the sandbox ends: at `port` for clients, at the socket `name` for us."""
    command = [python, "-I", "-S", "-c", _INSIDE.read_text(), f"{SOCKETS}/{name}", str(port)]
    with suppress(SandboxLostError):
        while True:  # Programs of the sandbox may kill the relay, because it runs as their user.
            await sandbox.exec(command, timeout_s=_FOR_EVER_S)
            await anyio.sleep(_RESTART_S)


async def _connected(sandbox: Sandbox, name: str) -> socket.socket:
    """Return a connection to the relay; wait until the relay listens."""
    pause_s = _RETRY_S
    while True:
        with suppress(UnreachableError, OSError):
            return await sandbox.connect(name)
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, _RESTART_S)


async def _head(client: SocketStream, first: bytes) -> tuple[bytes, bytes]:
    """Receive the rest of a request head that begins with `first`; return the head and any bytes after it."""
    received = first
    with anyio.move_on_after(_HEAD_S):
        while _END not in received:
            piece = await client.receive() if len(received) <= _HEAD_BYTES else b""
            if not piece:
                raise RefusedError(400, "not a request")
            received += piece
        head, _, rest = received.partition(_END)
        return head + _END, rest
    raise RefusedError(400, f"no complete request within {_HEAD_S:g} s")


async def _join(client: SocketStream, upstream: SocketStream, first: bytes) -> None:
    """Send `first` to `upstream`, then copy bytes both ways until `upstream` ends or no data comes for `_IDLE_S`."""

    async def carry_up() -> None:
        with suppress(ConnectionError):
            await upstream.send(first)
            while data := await client.receive():
                idle.deadline = clock.now() + _IDLE_S
                await upstream.send(data)
            await upstream.end()

    async with anyio.create_task_group() as tasks:
        idle = tasks.cancel_scope
        idle.deadline = clock.now() + _IDLE_S
        tasks.start_soon(carry_up)
        with suppress(ConnectionError):
            while data := await upstream.receive():
                idle.deadline = clock.now() + _IDLE_S
                await client.send(data)
        idle.cancel()


def _refusal(refusal: RefusedError) -> bytes:
    why = "".join(one if one.isascii() and one.isprintable() else "?" for one in str(refusal)[:300])
    body = f"{why}\n"
    head = f"HTTP/1.1 {refusal.status} {why}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n{body}".encode()
