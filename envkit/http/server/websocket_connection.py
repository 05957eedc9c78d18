"""uvicorn's WebSocket connections with the limits that `envkit.http.server.http_connection` has for HTTP.

Bytes of messages that the application has not received are counted; see
`envkit.http.limits.memory_budget.Backpressure`.
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
from envkit.http.limits.timeouts import ANSWER_S, SlowClientTimer, min_rate
from envkit.http.server.http_connection import CoalescingTransport

MAX_PAUSE_S = 10.0
"""Seconds that a socket may be paused in the middle of a message by the memory limit, before it is closed."""

_MAX_UNREAD_BYTES = 1 << 20
"""Number of unread bytes above which a ping from the client closes the connection."""

_MAX_FRAGMENTS = 10_000


class WebSocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timer = SlowClientTimer()
        self._messages = 0
        self._queued_bytes = 0
        self._backpressure: Backpressure | None = None
        self._paused_since: float | None = None
        """When the memory limit paused reading."""
        self._times_drained = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport.transport if isinstance(transport, CoalescingTransport) else transport)

    def enforce_timeouts(self, now: float, *, is_full: bool) -> None:
        """Disconnect a client that reads or sends a message too slowly; an idle one may stay."""
        transport, timer = self.transport, self._timer
        if self._backpressure is not None and not transport.is_closing():
            self._count()
            self._pause_or_resume(now)
        if transport.is_closing() or not self.writable.is_set():
            if timer.is_over(("answer", self._times_drained), -transport.get_write_buffer_size(), now, ANSWER_S):
                transport.abort()
        elif (size := self._partial_bytes()) and self._paused_since is None:
            if timer.is_too_slow(("message", self._messages), size, now, min_rate(size)):
                self.conn.fail(CloseCode.POLICY_VIOLATION, "the message arrived too slowly")
                self.handle_parser_exception()
        else:
            timer.end()

    def _partial_bytes(self) -> int:
        """Return the bytes received of an incomplete message."""
        return len(self.conn.reader.buffer) + (sum(map(len, self.frames)) if self.frames else 0)

    def _count(self) -> None:
        """Count the bytes received that the application has not taken."""
        if self._backpressure is None:
            state: dict[str, Any] = getattr(self, "scope", {}).get("state", {})
            if "memory_budget" not in state:  # not authorized yet
                return
            self._backpressure = cast("MemoryBudget", state["memory_budget"]).backpressure(state["caller"])
        self._backpressure.hold(self._partial_bytes() + self._queued_bytes)

    def _pause_or_resume(self, now: float) -> None:
        """Pause reading while sockets are above their memory limit; close the socket after `MAX_PAUSE_S`."""
        backpressure = self._backpressure
        assert backpressure is not None
        # A message larger than the limit is allowed while it is alone, because it could never arrive otherwise.
        if not backpressure.is_too_much or backpressure.is_alone or self._partial_bytes() <= UNCOUNTED_BYTES:
            if self._paused_since is not None:
                self._paused_since = None
                if not self.read_paused:
                    self.transport.resume_reading()
        elif self._paused_since is None:
            self._paused_since = now
            if not self.read_paused:
                self.transport.pause_reading()
        elif now - self._paused_since > MAX_PAUSE_S:
            self.conn.fail(CloseCode.TRY_AGAIN_LATER, "WebSocket memory limit reached; retry later")
            self.handle_parser_exception()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._backpressure is not None or len(self.conn.reader.buffer) > UNCOUNTED_BYTES or self.frames:
            self._count()
            if self._backpressure is not None and not self.transport.is_closing():
                self._pause_or_resume(clock.now())

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if self._queued_bytes and self.queue.empty():  # reading is paused until then
            self._queued_bytes = 0
            self._count()
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._backpressure is not None:
            self._backpressure.hold(0)
            self._backpressure = None

    def taken(self) -> None:
        """Update the socket's memory after the application has taken a large message."""
        self._count()

    async def drained(self) -> None:
        """Wait until the client has read nearly all that was sent."""
        await self.writable.wait()

    def resume_writing(self) -> None:
        self._times_drained += 1
        super().resume_writing()

    def send_receive_event_to_app(self) -> None:
        self._messages += 1
        if self._backpressure is not None:
            self._queued_bytes += sum(map(len, self.frames))
        super().send_receive_event_to_app()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            self.scope.setdefault("state", {})["connection"] = self

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.transport.abort()

    def handle_cont(self, event: Frame) -> None:
        super().handle_cont(event)
        if len(self.frames) > _MAX_FRAGMENTS:
            self.conn.fail(CloseCode.POLICY_VIOLATION, f"the message has too many fragments (limit {_MAX_FRAGMENTS})")
            self.handle_parser_exception()

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except InvalidState:  # the client closed the socket at the same time, which must not stop the server
            self.transport.close()
