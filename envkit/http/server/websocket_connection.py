"""A connection that has become a WebSocket, with bounds, as `envkit.http.server.http_connection` has them for HTTP.

What it has of messages that the application has not taken is counted; see `envkit.http.limits.memory_budget.Backlog`.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, cast

from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from envkit import clock
from envkit.http.limits.memory_budget import UNCOUNTED_BYTES, Backpressure, MemoryBudget
from envkit.http.limits.timeouts import ANSWER_S, SlowClientTimer, least_rate
from envkit.http.server.http_connection import CoalescingTransport

HOLD_S = 10.0
"""Seconds for which a socket is not read because sockets hold too much, before it is closed in the middle of a
message.
"""

_MAX_UNREAD_BYTES = 1 << 20
"""What a socket may be owed for its pings."""

_MAX_FRAGMENTS = 10_000


class WebSocketConnection(WebSocketsSansIOProtocol):
    """A connection that has become a WebSocket."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._wait = SlowClientTimer()
        self._messages = 0
        self._queued_bytes = 0
        self._backlog: Backpressure | None = None
        self._held_since: float | None = None
        """Since when it is not read because sockets hold too much."""
        self._times_drained = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport.transport if isinstance(transport, CoalescingTransport) else transport)

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
            if wait.is_too_slow(("message", self._messages), size, now, least_rate(size)):
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
            self._backlog = cast("MemoryBudget", state["bodies"]).backlog(state["caller"])
        self._backlog.hold(self._unread() + self._queued_bytes)

    def _read_or_not(self, now: float) -> None:
        """Read no more of a message while sockets hold too much; close where that does not end."""
        backlog = self._backlog
        assert backlog is not None
        # One that is alone may be larger than all may be together, or it could never come.
        if not backlog.is_too_much or backlog.is_alone or self._unread() <= UNCOUNTED_BYTES:
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

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if self._queued_bytes and self.queue.empty():  # before that nothing more is read
            self._queued_bytes = 0
            self._count()
        return message

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
            self.scope.setdefault("state", {})["link"] = self

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
