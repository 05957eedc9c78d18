"""The connections of a server, as uvicorn has them, with bounds: no client holds memory or a place by being slow.

What a client owes is looked at every few seconds, since a timer for each request would cost more than a look at
thousands of connections. What a client may take is a time that does not depend on it, and a rate beyond that.
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
from envkit.http.limits.timeouts import ANSWER_S, SlowClientTimer, least_rate
from envkit.http.protocol.asgi import PROBLEM, RETRY_AFTER_S, Receive, Scope, Send, respond_problem
from envkit.http.protocol.messages import Problem, write

LOOK_S = 5.0
"""Seconds between two looks at what clients owe."""

HEAD_S = 20.0
"""Seconds in which the head of a request has to come, counted from the connection's beginning or the head's."""

MAX_HEAD_BYTES = 64 << 10
"""Size above which the head of a request is refused: its line and its headers."""

STANDING = 1.1
"""How many times the connections that are served are held, so that the others are told; those beyond are dropped."""


class CoalescingTransport:
    """A transport that holds the head of an answer back until its body comes, if it has one of a known length.

    uvicorn writes them apart, and a call of the kernel costs a sixth of a step.
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
        most: Connections that are served at once.
        more: As uvicorn gives it.
    """

    cycle: RequestResponseCycle | None  # type: ignore[assignment]  # there is none before the first request

    def __init__(self, *, most: int, **more: Any) -> None:
        super().__init__(**more)
        self._most = most
        self._served = self.app
        self._wait = SlowClientTimer()
        self._running: RequestResponseCycle | None = None
        self._is_head_too_large = False
        self._unread_bytes = 0  # since something was complete, be it a head or a piece of a body
        self._body_bytes = 0
        self._times_drained = 0

    def look(self, now: float, *, is_full: bool) -> None:
        """Let go of a client that takes too long, or does nothing while others find no place."""
        transport, cycle, wait = self.transport, self.cycle, self._wait
        if transport.is_closing() or self.flow.write_paused:
            size = transport.get_write_buffer_size()
            if wait.is_over(("answer", self._times_drained), -size, now, ANSWER_S):
                transport.abort()
        elif cycle is None or cycle.response_complete:
            bound_s = HEAD_S if self.timeout_keep_alive_task is None else math.inf
            if wait.is_over(("head", cycle), 0, now, 0.0 if is_full else bound_s):
                if self._unread_bytes and not is_full:
                    late = RequestError(f"the head of the request was not there within {HEAD_S:g} s")
                    self.refuse(late, HTTPStatus.REQUEST_TIMEOUT)
                else:
                    transport.close()
        elif cycle.more_body and not cycle.response_started and not self.flow.read_paused:
            rate = least_rate(announced_bytes(cast("Scope", cycle.scope)))
            if wait.is_too_slow(("body", cycle), self._body_bytes, now, rate):
                late = RequestError(f"the body came with less than {rate:.0f} bytes a second")
                self.refuse(late, HTTPStatus.REQUEST_TIMEOUT)
        else:
            wait.end()

    def refuse(self, error: EnvkitError, status: int) -> None:
        """Answer what cannot be passed on, and close."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self.pipeline or cycle.response_started:
                self.transport.abort()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = write(_problem(error, status))
        again = b"retry-after: %d\r\n" % RETRY_AFTER_S if error.retry else b""
        head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
        phrase = HTTPStatus(status).phrase.encode()
        self.transport.write(head % (status, phrase, PROBLEM, len(body), again) + body)
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._once = CoalescingTransport(transport)
        super().connection_made(cast("asyncio.Transport", self._once))
        if len(self.connections) > self._most * STANDING:
            transport.abort()

    def on_response_complete(self) -> None:
        self._once.flush()  # there are answers without a body
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:  # uvicorn tells only the last of a row
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
            self.app = self._served if len(self.connections) <= self._most else cast("ASGI3Application", _full)
        super().on_headers_complete()
        self.scope["headers"] = self.headers.copy()  # what comes after the body is added to the other

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def handle_websocket_upgrade(self) -> None:
        if self._is_head_too_large:
            self.refuse(_head_error(), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif len(self.connections) > self._most:
            self.refuse(_no_room(), HTTPStatus.SERVICE_UNAVAILABLE)
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


class Beginning(Protocol):
    """Connections that are not there yet; `envkit.http.server.tls.Handshakes` are."""

    def __len__(self) -> int: ...

    def look(self, now: float, *, bound_s: float) -> None:
        """Let go of those that began more than `bound_s` ago."""
        ...


async def keep_looking(connections: Collection[Any], most: int, beginning: Beginning | None = None) -> None:
    """Let go of clients that take too long, for ever.

    Args:
        connections: The connections of a server; each is a `HttpConnection` or a
            `envkit.http.server.websocket_connection.SocketConnection`.
        most: How many of them are served at once.
        beginning: Those that count as well; they have a deadline of their own, and a look's time when there are too
            many.
    """
    while True:
        await anyio.sleep(LOOK_S)
        count = len(connections) + (0 if beginning is None else len(beginning))
        is_full, now = count >= most, clock.now()
        if is_full and beginning is not None:
            beginning.look(now, bound_s=LOOK_S)
        for connection in list(connections):
            connection.look(now, is_full=is_full)


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    problem = _problem(_no_room(), HTTPStatus.SERVICE_UNAVAILABLE)
    await respond_problem(send, problem, [(b"connection", b"close")])


async def _head_too_large(scope: Scope, receive: Receive, send: Send) -> None:
    problem = _problem(_head_error(), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    await respond_problem(send, problem, [(b"connection", b"close")])


def _head_error() -> TooLargeError:
    return TooLargeError(f"the head of a request may have {MAX_HEAD_BYTES} bytes")


def _no_room() -> CapacityError:
    return CapacityError("the server has as many connections as it takes; come again")


def _problem(error: EnvkitError, status: int) -> Problem:
    return msgspec.convert({**to_problem(error), "status": status}, Problem)
