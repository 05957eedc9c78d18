"""The connections of a server, as uvicorn has them, with bounds: no client holds memory or a place by being slow.

What a client owes is looked at every few seconds, since a timer for each request would cost more than a look at
thousands of connections. What a client may take is a time that does not depend on it, and a rate beyond that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from http import HTTPStatus
from typing import Any, Protocol, TypeAlias, cast

import anyio
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from envkit import clock
from envkit.errors import CapacityError, EnvkitError, RequestError, TooLargeError, to_problem
from envkit.http.asgi import PROBLEM, RETRY_AFTER_S, Receive, Scope, Send, respond_problem
from envkit.http.bodies import UNCOUNTED_BYTES, Backlog, Bodies, announced_bytes
from envkit.http.wire import Problem, write

LOOK_S = 5.0
"""Seconds between two looks at what clients owe."""

HEAD_S = 20.0
"""Seconds in which the head of a request has to come, counted from the connection's beginning or the head's."""

BODY_S = 30.0
"""Seconds in which a body, or a message of a socket, has to come at `BYTES_PER_S`, again and again."""

HELD_S = 600.0
"""Seconds that a body, or a message, may take as a whole that is held in memory until it is complete, roughly."""

ANSWER_S = 120.0
"""Seconds in which a client may read nothing; one that trains in the loop's own thread is deaf for a while."""

BYTES_PER_S = 16 << 10
"""What the slowest clients send and read."""

HOLD_S = 10.0
"""Seconds for which a socket is not read because sockets hold too much, before it is closed in the middle of a
message.
"""

MAX_HEAD_BYTES = 64 << 10
"""Size above which a head is refused, unless it comes in one piece."""

_MAX_UNREAD_BYTES = 1 << 20
"""What a socket may be owed for its pings."""

_MAX_FRAGMENTS = 10_000
STANDING = 1.1
"""How many times the connections that are served are held, so that the others are told; those beyond are dropped."""


class _Wait:
    """For how long a client has kept the server waiting for the same thing, at a look each."""

    __slots__ = ("_about", "_done", "_since")

    def __init__(self) -> None:
        self._about: object = None
        self._since = 0.0
        self._done = 0

    def is_over(self, about: object, done: int, now: float, bound_s: float) -> bool:
        """Say whether it has lasted for too long.

        Args:
            about: What is waited for.
            done: Bytes of it so far, as seen from anywhere.
            now: Seconds of the loop's clock.
            bound_s: Seconds that it may last beyond what those bytes take.
        """
        if about != self._about:
            self._about, self._since, self._done = about, now, done
            return False
        return now - self._since > bound_s + (done - self._done) / BYTES_PER_S

    def is_too_slow(self, about: object, done: int, now: float, rate: float) -> bool:
        """Say whether less than `rate` bytes a second of it came for `BODY_S`, as seen at looks; see `is_over`."""
        if about == self._about:
            if now - self._since < BODY_S:
                return False
            if done - self._done < rate * (now - self._since):
                return True
        self._about, self._since, self._done = about, now, done
        return False

    def end(self) -> None:
        self._about = None


class _OneWrite:
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


class Connection(HttpToolsProtocol):
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
        self._wait = _Wait()
        self._running: RequestResponseCycle | None = None
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
            rate = _least(announced_bytes(cast("Scope", cycle.scope)))
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
        self._once = _OneWrite(transport)
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
            error = TooLargeError(f"the head of a request may have {MAX_HEAD_BYTES} bytes")
            self.refuse(error, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        self.app = self._served if len(self.connections) <= self._most else cast("ASGI3Application", _full)
        super().on_headers_complete()
        self.scope["headers"] = self.headers.copy()  # what comes after the body is added to the other

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def handle_websocket_upgrade(self) -> None:
        if len(self.connections) > self._most:
            self.refuse(_no_room(), HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        self.refuse(RequestError(msg), HTTPStatus.BAD_REQUEST)

    def resume_writing(self) -> None:
        self._times_drained += 1
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)


class SocketConnection(WebSocketsSansIOProtocol):
    """A connection that has become a WebSocket."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._wait = _Wait()
        self._messages = 0
        self._queued_bytes = 0
        self._backlog: Backlog | None = None
        self._held_since: float | None = None
        """Since when it is not read because sockets hold too much."""
        self._times_drained = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport.transport if isinstance(transport, _OneWrite) else transport)

    def look(self, now: float, *, is_full: bool) -> None:
        """Let go of a client that takes too long to read, or to end a message; one that says nothing may stay."""
        transport, wait = self.transport, self._wait
        if self._backlog is not None and not transport.is_closing():
            self._count()
            self._read_or_not(now)
        if transport.is_closing() or not self.writable.is_set():
            if wait.is_over(("answer", self._times_drained), -transport.get_write_buffer_size(), now, ANSWER_S):
                transport.abort()
        elif (size := self._unread()) and self._held_since is None:
            if wait.is_too_slow(("message", self._messages), size, now, _least(size)):
                self.conn.fail(CloseCode.POLICY_VIOLATION, "the message came too slowly")
                self.handle_parser_exception()
        else:
            wait.end()

    def _unread(self) -> int:
        """Return the bytes that there are of a message that is not complete."""
        return len(self.conn.reader.buffer) + (sum(map(len, self.frames)) if self.frames else 0)

    def _count(self) -> None:
        """Count what has come and was not taken by the application."""
        if self._backlog is None:
            state: dict[str, Any] = getattr(self, "scope", {}).get("state", {})
            if "bodies" not in state:  # nobody has looked yet who it is
                return
            self._backlog = cast("Bodies", state["bodies"]).backlog(state["caller"])
        if self.queue.empty():
            self._queued_bytes = 0
        self._backlog.hold(self._unread() + self._queued_bytes)

    def _read_or_not(self, now: float) -> None:
        """Read no more of a message while sockets hold too much; close where that does not end."""
        assert self._backlog is not None
        if not (self._backlog.is_too_much and self._unread() > UNCOUNTED_BYTES):
            if self._held_since is not None:
                self._held_since = None
                if not self.read_paused:
                    self.transport.resume_reading()
        elif self._held_since is None:
            self._held_since = now
            if not self.read_paused:
                self.transport.pause_reading()
        elif now - self._held_since > HOLD_S:
            self.conn.fail(CloseCode.TRY_AGAIN_LATER, "the server holds as much for sockets as it does; come again")
            self.handle_parser_exception()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._backlog is not None or len(self.conn.reader.buffer) > UNCOUNTED_BYTES or self.frames:
            self._count()
            if self._backlog is not None and not self.transport.is_closing():
                self._read_or_not(clock.now())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._backlog is not None:
            self._backlog.hold(0)
            self._backlog = None

    def taken(self) -> None:
        """Hear that the application has taken a large message."""
        self._count()

    async def drained(self) -> None:
        """Wait until the client has read nearly all of what was sent."""
        await self.writable.wait()

    def resume_writing(self) -> None:
        self._times_drained += 1
        super().resume_writing()

    def send_receive_event_to_app(self) -> None:
        self._messages += 1
        if self._backlog is not None:
            self._queued_bytes += sum(map(len, self.frames))
        super().send_receive_event_to_app()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            self.scope["state"]["link"] = self

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.transport.abort()

    def handle_cont(self, event: Frame) -> None:
        super().handle_cont(event)
        if len(self.frames) > _MAX_FRAGMENTS:
            self.conn.fail(CloseCode.POLICY_VIOLATION, "the message has too many pieces")
            self.handle_parser_exception()

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except InvalidState:  # its client is just leaving too, which must not take the server with it
            self.transport.close()


Looked: TypeAlias = Connection | SocketConnection


class Beginning(Protocol):
    """Connections that are not there yet; `envkit.http.handshakes.Handshakes` are."""

    def __len__(self) -> int: ...

    def look(self, now: float, *, bound_s: float) -> None:
        """Let go of those that began more than `bound_s` ago."""
        ...


async def keep_looking(connections: Collection[Any], most: int, beginning: Beginning | None = None) -> None:
    """Let go of clients that take too long, for ever.

    Args:
        connections: The connections of a server; each is a `Connection` or `SocketConnection`.
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


def _least(size: int) -> float:
    """Return how many bytes a second the slowest clients send of a body that is held while it has `size` bytes."""
    return max(BYTES_PER_S, size / HELD_S)


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    problem = _problem(_no_room(), HTTPStatus.SERVICE_UNAVAILABLE)
    await respond_problem(send, problem, [(b"connection", b"close")])


def _no_room() -> CapacityError:
    return CapacityError("the server has as many connections as it takes; come again")


def _problem(error: EnvkitError, status: int) -> Problem:
    return msgspec.convert({**to_problem(error), "status": status}, Problem)
