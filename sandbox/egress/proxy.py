"""The HTTP proxy for the hosts that a sandbox may reach.

The sandbox has no network. `envkit.sandbox.egress.relay_inside` runs in it, and ``HTTP_PROXY`` and ``HTTPS_PROXY``
point at it. The proxy keeps idle connections into the sandbox and serves the requests that arrive on them, as
`envkit.sandbox.egress.allowlist` allows. HTTPS is tunnelled (``CONNECT``) and not inspected: an allowed server may
forward data anywhere. A plain HTTP connection carries one request, only to the host that it names.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
"""Name of the sandbox's socket that the proxy connects to."""

_ADDRESS = f"http://127.0.0.1:{PORT}"
VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _ADDRESS),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}
"""Environment variables of a sandbox with a proxy."""

_WAIT = ("sh", "-c", f'until [ -S "$ENVKIT_SOCKETS/{SOCKET}" ]; do sleep 0.02; done; exec "$@"', "sh")
_IDLE_CONNECTIONS = 4
"""Number of connections into the sandbox that wait for a client."""
_AT_ONCE = 64
_HEAD_BYTES = 64 << 10
_HEAD_S = 10.0
_IDLE_S = 300.0
_LINGER_S = 30.0
"""Maximum time to send the rest of a complete response."""
_RETRY_S = 0.02
"""Initial delay between connection attempts; doubled each time, up to `_RESTART_S`."""
_RESTART_S = 1.0
_FOR_EVER_S = 1e9
_END = b"\r\n\r\n"
_OWN_HEADERS = (b"connection", b"host", b"keep-alive", b"proxy-authorization", b"proxy-connection")
_INSIDE = Path(__file__).with_name("relay_inside.py")


def variables(spec: SandboxSpec) -> Mapping[str, str]:
    """Return the environment variables of a sandbox with an allowlist; empty for others."""
    return {} if isinstance(spec.network, str) else VARIABLES


def waiting(spec: SandboxSpec, command: Sequence[str]) -> tuple[str, ...]:
    """Return an argv that runs `command` after the proxy is ready, if `spec` needs one; empty without a command."""
    return (*_WAIT, *command) if command and not isinstance(spec.network, str) else tuple(command)


async def open_for(
    sandbox: AgentSandbox, spec: SandboxSpec, python: str, *, resolve: Resolve = public_addresses
) -> None:
    """Serve the proxy for the hosts of `spec` as long as `sandbox` lives; does nothing without an allowlist.

    Args:
        sandbox: Started from `spec`, with `VARIABLES` in its environment, and no network.
        spec: Its specification.
        python: Its Python.
        resolve: Returns the allowed addresses of a host.

    Raises:
        SandboxEndedError: The relay does not start, or the sandbox has ended by itself; the sandbox is stopped.
        SandboxStartError: The sandbox is gone for another reason.
    """
    if isinstance(spec.network, str):
        return
    command = [python, "-I", "-S", "-c", _INSIDE.read_text(), f"{SOCKETS}/{SOCKET}", str(PORT)]
    sandbox.while_alive(_keep_running(sandbox, command))
    try:
        with anyio.move_on_after(spec.start_timeout_s):
            (await _connected(sandbox)).close()
            sandbox.while_alive(Proxy(Allowlist(spec.network, resolve)).serve(sandbox))
            return
    except SandboxLostError as error:
        await sandbox.stop()
        raise not_ready(sandbox.id, error.cause) from None
    except BaseException:
        await sandbox.stop()
        raise
    await sandbox.stop()
    raise SandboxEndedError(sandbox.id, f"the proxy relay at {_ADDRESS} inside did not start")


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A request to the proxy.

    Attributes:
        host: The target host.
        port: Its port.
        head: The request head to send to the host; empty for ``CONNECT``.
    """

    host: str
    port: int
    head: bytes

    @classmethod
    def parse(cls, head: bytes) -> ProxyRequest:
        """Parse a request head, including its final empty line.

        Raises:
            RefusedError: It is not a valid proxy request.
        """
        line, *headers = head.removesuffix(_END).split(b"\r\n")
        if any(part in one for one in (line, *headers) for part in (b"\r", b"\n", b"\0")):
            raise RefusedError(400, "not a request")  # a server may split one header into two
        if any(one.startswith((b" ", b"\t")) for one in headers):
            raise RefusedError(400, "not a request")  # a folded line would continue the previous header, perhaps ours
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


class Proxy:
    """Serves the requests of one sandbox.

    Args:
        allowlist: The hosts that it may reach.
    """

    def __init__(self, allowlist: Allowlist) -> None:
        self._allowlist = allowlist
        self._limit = anyio.CapacityLimiter(_AT_ONCE)

    async def serve(self, sandbox: Sandbox) -> None:
        """Keep idle connections into `sandbox` and serve the requests on them, until it is gone."""
        async with anyio.create_task_group() as tasks:

            async def serve_connection() -> None:
                async with self._limit:
                    try:
                        client = SocketStream(await _connected(sandbox))
                    except SandboxLostError:
                        tasks.cancel_scope.cancel()
                        return
                    try:
                        first = await client.receive()
                        if not first:  # closed by the sandbox; do not reconnect in a busy loop
                            await anyio.sleep(_RESTART_S)
                        tasks.start_soon(serve_connection)  # replaces this connection, which is no longer idle
                        await self._answer(client, first)
                    finally:
                        client.close()

            for _ in range(_IDLE_CONNECTIONS):
                tasks.start_soon(serve_connection)

    async def _answer(self, client: SocketStream, first: bytes) -> None:
        """Answer the request that begins with `first`."""
        with suppress(ConnectionError):
            try:
                head, rest = await _head(client, first)
                request = ProxyRequest.parse(head)
                upstream = SocketStream(await self._allowlist.connect(request.host, request.port))
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


async def _keep_running(sandbox: AgentSandbox, command: Sequence[str]) -> None:
    with suppress(SandboxLostError):
        while True:  # programs of the sandbox may kill the relay, which runs as the same user
            await sandbox.exec(command, timeout_s=_FOR_EVER_S)
            await anyio.sleep(_RESTART_S)


async def _connected(sandbox: Sandbox) -> socket.socket:
    """Connect to the relay as soon as it listens."""
    pause_s = _RETRY_S
    while True:
        with suppress(UnreachableError, OSError):
            return await sandbox.connect(SOCKET)
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, _RESTART_S)


async def _head(client: SocketStream, first: bytes) -> tuple[bytes, bytes]:
    """Return the head of the request that begins with `first`, and the data after it."""
    received = first
    with anyio.move_on_after(_HEAD_S):
        while _END not in received:
            piece = await client.receive() if len(received) <= _HEAD_BYTES else b""
            if not piece:
                raise RefusedError(400, "not a request")
            received += piece
        head, _, rest = received.partition(_END)
        return head + _END, rest
    raise RefusedError(400, f"not a request within {_HEAD_S:g} s")


async def _join(client: SocketStream, upstream: SocketStream, first: bytes) -> None:
    """Copy bytes both ways, `first` first, until `upstream` ends or the connection is idle for `_IDLE_S`."""

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
