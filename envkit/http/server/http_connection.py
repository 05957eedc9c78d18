"""uvicorn's HTTP connections with limits, so that slow clients cannot hold memory or connection slots.

One task checks all connections every few seconds, because a timer for each request would cost more. The timeout of a
client is a fixed time plus the time that its bytes take at a minimum rate.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from http import HTTPStatus
from typing import Any, Protocol, cast

import anyio
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from envkit import clock
from envkit.errors import CapacityError, EnvkitError, RequestError, TooLargeError, to_problem
from envkit.http.limits.memory_budget import announced_bytes
from envkit.http.limits.timeouts import ANSWER_S, SlowClientTimer, min_rate
from envkit.http.protocol.asgi import PROBLEM, RETRY_AFTER_S, Receive, Scope, Send, respond_problem
from envkit.http.protocol.messages import Problem, write

CHECK_INTERVAL_S = 5.0
"""Seconds between two checks of all connections for slow clients."""

HEAD_S = 20.0
"""Seconds within which the head of a request must arrive, counted from the start of the connection or of the head."""

MAX_HEAD_BYTES = 64 << 10
"""Maximum size of the head of a request: request line and headers."""

OPEN_FACTOR = 1.1
"""Connections above the limit are answered with 503, up to this multiple of the limit; others are dropped."""


class CoalescingTransport:
    """A transport that writes the head of an answer together with its body, if the body has a known length.

    uvicorn writes them separately, and a system call costs a sixth of a step.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.is_closing = transport.is_closing
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        head, self._head = self._head, None
        if head is not None:
            self.transport.writelines((head, data))
        elif data.startswith(b"HTTP/") and b"\r\ncontent-length: " in data:
            self._head = data
        else:
            self.transport.write(data)

    def flush(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            self.transport.write(head)

    def close(self) -> None:
        self.flush()
        self.transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class HttpConnection(HttpToolsProtocol):
    """A connection that speaks HTTP.

    Args:
        max_connections: Limit on concurrent connections.
        options: Arguments of uvicorn.
    """

    cycle: RequestResponseCycle | None  # type: ignore[assignment]  # None before the first request

    def __init__(self, *, max_connections: int, **options: Any) -> None:
        super().__init__(**options)
        self._max_connections = max_connections
        self._served = self.app
        self._timer = SlowClientTimer()
        self._running: RequestResponseCycle | None = None
        self._is_head_too_large = False
        self._unread_bytes = 0  # received since the last complete head or piece of a body
        self._body_bytes = 0
        self._times_drained = 0

    def enforce_timeouts(self, now: float, *, is_full: bool) -> None:
        """Disconnect a client that is too slow, or idle while the server `is_full`."""
        transport, cycle, timer = self.transport, self.cycle, self._timer
        if transport.is_closing() or self.flow.write_paused:
            size = transport.get_write_buffer_size()
            if timer.is_over(("answer", self._times_drained), -size, now, ANSWER_S):
                transport.abort()
        elif cycle is None or cycle.response_complete:
            bound_s = HEAD_S if self.timeout_keep_alive_task is None else math.inf
            if timer.is_over(("head", cycle), 0, now, 0.0 if is_full else bound_s):
                if self._unread_bytes and not is_full:
                    late = RequestError(f"the request head did not arrive within {HEAD_S:g} s")
                    self.refuse(late, HTTPStatus.REQUEST_TIMEOUT)
                else:
                    transport.close()
        elif cycle.more_body and not cycle.response_started and not self.flow.read_paused:
            rate = min_rate(announced_bytes(cast("Scope", cycle.scope)))
            if timer.is_too_slow(("body", cycle), self._body_bytes, now, rate):
                late = RequestError(f"the body arrived more slowly than {rate:.0f} bytes/s")
                self.refuse(late, HTTPStatus.REQUEST_TIMEOUT)
        else:
            timer.end()

    def refuse(self, error: EnvkitError, status: int) -> None:
        """Answer a request without passing it to the application, and close the connection."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self.pipeline or cycle.response_started:
                self.transport.abort()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = write(_problem(error, status))
        retry_after = b"retry-after: %d\r\n" % RETRY_AFTER_S if error.retry else b""
        head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
        phrase = HTTPStatus(status).phrase.encode()
        self.transport.write(head % (status, phrase, PROBLEM, len(body), retry_after) + body)
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._coalescing = CoalescingTransport(transport)
        super().connection_made(cast("asyncio.Transport", self._coalescing))
        if len(self.connections) > self._max_connections * OPEN_FACTOR:
            transport.abort()

    def on_response_complete(self) -> None:
        self._coalescing.flush()  # the answer may have no body
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn notifies only the last pipelined request.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.refuse(_head_error(), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        is_large = self._unread_bytes > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES
        self._is_head_too_large = is_large
        self._unread_bytes = 0
        if is_large:
            self.app = cast("ASGI3Application", _head_too_large)
        else:
            is_full = len(self.connections) > self._max_connections
            self.app = cast("ASGI3Application", _full) if is_full else self._served
        super().on_headers_complete()
        self.scope["headers"] = self.headers.copy()  # a copy, because uvicorn appends trailers to its list

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def handle_websocket_upgrade(self) -> None:
        if self._is_head_too_large:
            self.refuse(_head_error(), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif len(self.connections) > self._max_connections:
            self.refuse(_too_many_connections(), HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        self.refuse(RequestError(msg), HTTPStatus.BAD_REQUEST)

    def resume_writing(self) -> None:
        self._times_drained += 1
        super().resume_writing()

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)


class PendingConnections(Protocol):
    """Connections that are not yet established, such as those of `envkit.http.server.tls.TlsAcceptor`."""

    def __len__(self) -> int: ...

    def enforce_timeouts(self, now: float, *, bound_s: float) -> None:
        """Close those that are pending for more than `bound_s` seconds."""
        ...


async def monitor(
    connections: Collection[Any], max_connections: int, pending: PendingConnections | None = None
) -> None:
    """Disconnect slow clients, forever.

    Args:
        connections: The connections of a server; each is an `HttpConnection` or an
            `envkit.http.server.websocket_connection.WebSocketConnection`.
        max_connections: Connections served at once.
        pending: Connections that count as well; `CHECK_INTERVAL_S` is their timeout while the server is full.
    """
    while True:
        await anyio.sleep(CHECK_INTERVAL_S)
        count = len(connections) + (0 if pending is None else len(pending))
        is_full, now = count >= max_connections, clock.now()
        if is_full and pending is not None:
            pending.enforce_timeouts(now, bound_s=CHECK_INTERVAL_S)
        for connection in list(connections):
            connection.enforce_timeouts(now, is_full=is_full)


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    problem = _problem(_too_many_connections(), HTTPStatus.SERVICE_UNAVAILABLE)
    await respond_problem(send, problem, [(b"connection", b"close")])


async def _head_too_large(scope: Scope, receive: Receive, send: Send) -> None:
    problem = _problem(_head_error(), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    await respond_problem(send, problem, [(b"connection", b"close")])


def _head_error() -> TooLargeError:
    return TooLargeError(f"the request head is too large (limit {MAX_HEAD_BYTES} bytes)")


def _too_many_connections() -> CapacityError:
    return CapacityError("too many connections; retry later")


def _problem(error: EnvkitError, status: int) -> Problem:
    return msgspec.convert({**to_problem(error), "status": status}, Problem)
