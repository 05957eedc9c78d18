"""Lets a box reach some hosts by HTTP and HTTPS, and nothing else.

The box has no network. In it runs `envkit.sandbox.egress.relay_inside`, at which ``HTTP_PROXY`` and ``HTTPS_PROXY``
point; we keep some connections into the box waiting, and answer what is asked over them, as
`envkit.sandbox.egress.allowlist` allows. HTTPS is passed on as it is (``CONNECT``) and never looked into: what an
allowed server does with what it is sent, it does. Of plain HTTP each connection carries one request, whose host is the
one that was asked for.
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
"""Where the box's programs find the proxy."""
SOCKET = "proxy"
"""Where, among the box's sockets, we come in."""

_ADDRESS = f"http://127.0.0.1:{PORT}"
VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _ADDRESS),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}
"""Environment of a box that has a proxy."""

_WAIT = ("sh", "-c", f'until [ -S "$ENVKIT_SOCKETS/{SOCKET}" ]; do sleep 0.02; done; exec "$@"', "sh")
_SPARE = 4
"""Connections into the box that wait for a client."""
_AT_ONCE = 64
_HEAD_BYTES = 64 << 10
_HEAD_S = 10.0
_IDLE_S = 300.0
_LINGER_S = 30.0
"""What is left to send when an answer is complete may take as long."""
_RETRY_S = 0.02
"""Between attempts to come in; doubled each time, up to `_RESTART_S`."""
_RESTART_S = 1.0
_FOR_EVER_S = 1e9
_END = b"\r\n\r\n"
_OWN_HEADERS = (b"connection", b"host", b"keep-alive", b"proxy-authorization", b"proxy-connection")
_INSIDE = Path(__file__).with_name("relay_inside.py")


def variables(spec: SandboxSpec) -> Mapping[str, str]:
    """Return what a box that is to reach some hosts has in its environment; nothing for others."""
    return {} if isinstance(spec.network, str) else VARIABLES


def waiting(spec: SandboxSpec, command: Sequence[str]) -> tuple[str, ...]:
    """Return what runs `command` once there is a proxy, if `spec` is to have one; nothing for no command."""
    return (*_WAIT, *command) if command and not isinstance(spec.network, str) else tuple(command)


async def open_for(box: AgentSandbox, spec: SandboxSpec, python: str, *, resolve: Resolve = public_addresses) -> None:
    """Let `box` reach the hosts that `spec` names, for as long as it lives; nothing to do if it names none.

    Args:
        box: Started as `spec`, with `VARIABLES` in its environment, and no network.
        spec: What it is to be.
        python: Its Python.
        resolve: Says where a host is.

    Raises:
        SandboxEndedError: It does not work inside, or the box has ended by itself; the box is stopped.
        SandboxStartError: The box is gone otherwise.
    """
    if isinstance(spec.network, str):
        return
    command = [python, "-I", "-S", "-c", _INSIDE.read_text(), f"{SOCKETS}/{SOCKET}", str(PORT)]
    box.while_alive(_keep_running(box, command))
    try:
        with anyio.move_on_after(spec.start_timeout_s):
            (await _connected(box)).close()
            box.while_alive(Proxy(Allowlist(spec.network, resolve)).serve(box))
            return
    except SandboxLostError as error:
        await box.stop()
        raise not_ready(box.id, error.cause) from None
    except BaseException:
        await box.stop()
        raise
    await box.stop()
    raise SandboxEndedError(box.id, f"no proxy listens at {_ADDRESS} in it")


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A request to a proxy.

    Attributes:
        host: Whom it is for.
        port: Which of its ports.
        head: What that host is sent first; empty for ``CONNECT``.
    """

    host: str
    port: int
    head: bytes

    @classmethod
    def parse(cls, head: bytes) -> ProxyRequest:
        """Read what ends with an empty line.

        Raises:
            RefusedError: It is no request to a proxy.
        """
        line, *headers = head.removesuffix(_END).split(b"\r\n")
        if any(part in one for one in (line, *headers) for part in (b"\r", b"\n", b"\0")):
            raise RefusedError(400, "not a request")  # where we see one header, a server may see two
        if any(one.startswith((b" ", b"\t")) for one in headers):
            raise RefusedError(400, "not a request")  # goes on with the one before, which may be ours
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
            raise RefusedError(400, f"{target[:100]} is refused: only http and, by CONNECT, https are let through")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        kept = [header for header in headers if header.partition(b":")[0].strip().lower() not in _OWN_HEADERS]
        own = [f"{method} {path} {version}".encode(), f"Host: {parts.netloc}".encode(), b"Connection: close"]
        return cls(host, 80 if port is None else port, b"\r\n".join([*own, *kept]) + _END)


class Proxy:
    """Answers the requests of one box.

    Args:
        allowlist: Whom it may reach.
    """

    def __init__(self, allowlist: Allowlist) -> None:
        self._allowlist = allowlist
        self._limit = anyio.CapacityLimiter(_AT_ONCE)

    async def serve(self, box: Sandbox) -> None:
        """Keep connections into `box` waiting and answer what is asked over them, until it is gone."""
        async with anyio.create_task_group() as tasks:

            async def one() -> None:
                async with self._limit:
                    try:
                        client = SocketStream(await _connected(box))
                    except SandboxLostError:
                        tasks.cancel_scope.cancel()
                        return
                    try:
                        first = await client.receive()
                        if not first:  # hung up on, which must not set the pace
                            await anyio.sleep(_RESTART_S)
                        tasks.start_soon(one)  # in its place, now that it does not wait any more
                        await self._answer(client, first)
                    finally:
                        client.close()

            for _ in range(_SPARE):
                tasks.start_soon(one)

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


async def _keep_running(box: AgentSandbox, command: Sequence[str]) -> None:
    with suppress(SandboxLostError):
        while True:  # a program of the box may kill what runs as the same user, to its own harm
            await box.exec(command, timeout_s=_FOR_EVER_S)
            await anyio.sleep(_RESTART_S)


async def _connected(box: Sandbox) -> socket.socket:
    """Connect to what runs inside, once it listens."""
    pause_s = _RETRY_S
    while True:
        with suppress(UnreachableError, OSError):
            return await box.connect(SOCKET)
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, _RESTART_S)


async def _head(client: SocketStream, first: bytes) -> tuple[bytes, bytes]:
    """Return the head of the request that begins with `first`, and what came after it."""
    came = first
    with anyio.move_on_after(_HEAD_S):
        while _END not in came:
            piece = await client.receive() if len(came) <= _HEAD_BYTES else b""
            if not piece:
                raise RefusedError(400, "not a request")
            came += piece
        head, _, rest = came.partition(_END)
        return head + _END, rest
    raise RefusedError(400, f"not a request within {_HEAD_S:g} s")


async def _join(client: SocketStream, upstream: SocketStream, first: bytes) -> None:
    """Carry bytes both ways, `first` before all, until `upstream` has ended or nothing comes for too long."""

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
