"""Queues of a WebSocket for received messages and unsent answers. They slow down clients that send too much."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import anyio

from envkit import clock
from envkit.http.protocol.asgi import Message, Receive, Send
from envkit.http.protocol.messages import batches

MAX_OWED = 10_000
"""Number of unanswered frames above which the server stops reading from a socket."""

MAX_UNREAD_BYTES = 8 << 20
"""Bytes of unread replies above which the server stops reading from a socket and starts no further calls from it."""

MAX_PENDING_BYTES = 64 << 20
"""Bytes of unanswered frames above which the server stops reading from a socket."""

_AHEAD_BYTES = 1 << 20
"""Bytes to read ahead while reading from a socket is paused. Reading ahead shows when the socket closes."""

_MESSAGE_BYTES = 256
"""Bytes of memory that a message uses in addition to its content."""

_BATCH_BYTES = 1 << 19
"""Bytes up to which answers are joined into one message: half of the default message limit of common clients."""


class Inbox:
    """Queue of the messages that were received from one socket."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: deque[Message] = deque()
        self._free_bytes = _AHEAD_BYTES

    async def take(self) -> Message:
        """Wait for the next message and return it."""
        if not self._ahead:
            return await self._receive()
        message = self._ahead.popleft()
        self._free_bytes += _size(message)
        return message

    async def pause_until(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Run `wait`, and meanwhile only read ahead. If the socket closes, drop unread messages and return early."""
        with anyio.CancelScope() as waiting:
            async with clock.background_tasks() as tasks:
                tasks.start_soon(self._read_ahead, waiting)
                await wait()

    async def _read_ahead(self, waiting: anyio.CancelScope) -> None:
        """Read messages into the queue up to `_AHEAD_BYTES`; cancel `waiting` if the socket closes."""
        while self._free_bytes > 0:
            message = await self._receive()
            if message["type"] != "websocket.receive":
                self._ahead.clear()
                self._ahead.append(message)
                waiting.cancel()
                return
            self._ahead.append(message)
            self._free_bytes -= _size(message)


def _size(message: Message) -> int:
    return _MESSAGE_BYTES + len(message.get("bytes") or message.get("text") or b"")


class Outbox:
    """Queue of the unsent answers of one socket. It also counts the memory of answers and of unanswered frames."""

    def __init__(self) -> None:
        self.owed = 0
        """Number of received frames whose replies have not been sent."""
        self._unread_bytes = 0
        self._pending_bytes = 0
        self._is_closed = False
        self._answers: list[bytes] = []
        # Use asyncio.Event: an anyio.Event cannot be cleared, and a new one for each message would cost more time.
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()

    def put(self, *answers: bytes) -> None:
        """Queue answers, which `run` sends."""
        if self._is_closed or not answers:
            return
        if not self._answers:
            self._filled.set()
        self._answers += answers
        self._unread_bytes += sum(map(len, answers))

    def put_and_forget(self, size: int, answer: bytes) -> None:
        """Queue the answer to a frame, and stop counting the `size` bytes of that frame."""
        self.put(answer)
        self.forget(size)

    def remember(self, size: int) -> None:
        """Count the `size` bytes of a frame that is not answered yet."""
        self._pending_bytes += size

    def forget(self, size: int) -> None:
        """Stop counting the `size` bytes of a frame, because it is answered."""
        if size:
            self._pending_bytes -= size
            self._emptied.set()

    @property
    def is_full(self) -> bool:
        """Whether unread replies exceed `MAX_UNREAD_BYTES`."""
        return self._unread_bytes > MAX_UNREAD_BYTES

    @property
    def is_behind(self) -> bool:
        """Whether the number or size of unanswered frames, or the size of unread replies, exceeds its limit."""
        return self.owed > MAX_OWED or self._pending_bytes > MAX_PENDING_BYTES or self.is_full

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

    async def _wait(self) -> None:
        self._emptied.clear()
        await self._emptied.wait()

    async def run(self, send: Send) -> None:
        """Send queued replies until cancelled or the socket closes."""
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                answers, self._answers = self._answers, []
                size = self._unread_bytes
                for batch in batches(answers, _BATCH_BYTES):
                    await send({"type": "websocket.send", "bytes": batch})
                self._sent(len(answers), size)
        except OSError:
            # The socket has closed. `receive` reports this to the reader of the socket, which then stops this task.
            pass
        finally:
            self._is_closed = True
            self._answers = []
            self._sent(self.owed, self._unread_bytes)

    def _sent(self, count: int, size: int) -> None:
        self.owed -= count
        self._unread_bytes -= size
        self._emptied.set()
