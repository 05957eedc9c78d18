"""Queues of a WebSocket: received messages and unsent answers, with backpressure."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio

from envkit.http.limits.memory_budget import UNCOUNTED_BYTES, Backpressure
from envkit.http.protocol.asgi import Message, Receive, Send
from envkit.http.protocol.messages import batches

MAX_OWED = 10_000
"""Number of unanswered frames above which the server stops reading from a socket."""

MAX_UNREAD_BYTES = 64 << 20
"""Bytes of unread answers above which the server stops reading from a socket."""

_CHECK_INTERVAL_S = 1.0
"""Seconds between checks whether sockets are still above their memory limit."""

_AHEAD_BYTES = 1 << 20
"""Bytes read ahead from a paused socket, to notice when it closes."""

_MESSAGE_BYTES = 256
"""Memory of a message in addition to its content."""

_BATCH_BYTES = 1 << 19
"""Half of the default message limit of common clients."""


class WebSocketFlow(Protocol):
    """Flow control of a WebSocket connection."""

    def taken(self) -> None:
        """Update the socket's memory after the application has taken a large message."""
        ...

    async def drained(self) -> None:
        """Wait until the client has read nearly all that was sent."""
        ...


class Inbox:
    """Received messages of one socket."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: deque[Message] = deque()
        self._free_bytes = _AHEAD_BYTES

    async def take(self) -> Message:
        """Return the next message."""
        if not self._ahead:
            return await self._receive()
        message = self._ahead.popleft()
        self._free_bytes += _size(message)
        return message

    async def pause(self, seconds: float) -> None:
        """Take no message for `seconds`; returns early, dropping earlier messages, if the socket closes."""
        with anyio.move_on_after(seconds):
            while self._free_bytes > 0:
                message = await self._receive()
                if message["type"] != "websocket.receive":
                    self._ahead.clear()
                    self._ahead.append(message)
                    return
                self._ahead.append(message)
                self._free_bytes -= _size(message)
            await anyio.sleep_forever()

    async def pause_until(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Take no message until `wait` returns; returns early like `pause`."""
        async with anyio.create_task_group() as tasks:

            async def wake() -> None:
                await wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(wake)
            await self.pause(math.inf)
            tasks.cancel_scope.cancel()


def _size(message: Message) -> int:
    return _MESSAGE_BYTES + len(message.get("bytes") or message.get("text") or b"")


class Outbox:
    """Unsent answers of one socket, and the memory of answers and pending frames."""

    def __init__(self, backpressure: Backpressure, flow: WebSocketFlow | None) -> None:
        self.owed = 0
        """Number of received frames whose answers have not been sent."""
        self._backpressure = backpressure
        self._flow = flow
        self._unread_bytes = 0
        self._pending_bytes = 0
        self._is_closed = False
        self._answers: list[bytes] = []
        # asyncio.Event, because anyio.Event cannot be cleared, and creating one for each message costs more.
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()

    def put(self, *answers: bytes) -> None:
        if self._is_closed or not answers:
            return
        if not self._answers:
            self._filled.set()
        self._answers += answers
        self._unread_bytes += sum(map(len, answers))
        if self._unread_bytes > UNCOUNTED_BYTES:
            self._count()

    def put_and_forget(self, size: int, answer: bytes) -> None:
        """Queue the answer to a pending frame and stop counting the frame's `size` bytes."""
        self.put(answer)
        self.forget(size)

    def remember(self, size: int) -> None:
        """Count `size` bytes of a pending frame."""
        self._pending_bytes += size
        if self._pending_bytes > UNCOUNTED_BYTES:
            self._count()

    def forget(self, size: int) -> None:
        """Stop counting `size` bytes of a pending frame."""
        if size:
            self._pending_bytes -= size
            if self._backpressure.count:
                self._count()
                self._emptied.set()

    def _count(self) -> None:
        self._backpressure.hold(self._pending_bytes + self._unread_bytes)

    @property
    def is_behind(self) -> bool:
        """Whether unsent answers exceed a limit in number or bytes."""
        return self.owed > MAX_OWED or self._unread_bytes > MAX_UNREAD_BYTES or self._backpressure.is_too_much

    async def wait_for_room(self) -> None:
        """Wait until `is_behind` is false."""
        while self.is_behind:
            await self._wait()

    async def wait_until_answered(self) -> None:
        """Wait until every frame is answered."""
        while self.owed:
            await self._wait()

    async def wait_for_reader(self) -> None:
        """Wait until `is_full` is false."""
        while self.is_full:
            await self._wait()

    @property
    def is_full(self) -> bool:
        """Whether unread answers exceed a limit in bytes."""
        return self._unread_bytes > UNCOUNTED_BYTES and (
            self._unread_bytes > MAX_UNREAD_BYTES or self._backpressure.is_too_much
        )

    async def _wait(self) -> None:
        self._emptied.clear()
        with anyio.move_on_after(_CHECK_INTERVAL_S):  # other sockets may free memory too
            await self._emptied.wait()

    async def run(self, send: Send) -> None:
        """Send queued answers until cancelled or the socket closes."""
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                answers, self._answers = self._answers, []
                size = self._unread_bytes
                for batch in batches(answers, _BATCH_BYTES):
                    await send({"type": "websocket.send", "bytes": batch})
                if size > UNCOUNTED_BYTES and self._flow is not None:
                    await self._flow.drained()
                self._sent(len(answers), size)
        except OSError:  # the socket was closed meanwhile; `receive` reports it
            pass
        finally:
            self._is_closed = True
            self._answers = []
            self._sent(self.owed, self._unread_bytes)

    def _sent(self, count: int, size: int) -> None:
        self.owed -= count
        self._unread_bytes -= size
        if self._backpressure.count:
            self._count()
        self._emptied.set()
