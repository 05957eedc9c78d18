"""What waits at a WebSocket: messages that came and are not taken, and answers that are there and not read."""

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
"""Answers that one socket may be owed; beyond it, nothing more is read from that socket."""

MAX_UNREAD_BYTES = 64 << 20
"""Size of those that are there and that its caller has not taken, likewise."""

_LOOK_S = 1.0
"""Seconds between looks whether sockets still hold too much."""

_AHEAD_BYTES = 1 << 20
"""How much is read ahead from a socket that has to wait, so that its end is heard."""

_MESSAGE_BYTES = 256
"""What a message takes beside its content."""

_BATCH_BYTES = 1 << 19
"""Half of what clients in the wild take in one message unless told otherwise."""


class WebSocketFlow(Protocol):
    """The connection beneath a socket."""

    def taken(self) -> None:
        """Hear that a large message was taken."""
        ...

    async def drained(self) -> None:
        """Wait until the client has read nearly all of what was sent."""
        ...


class Inbox:
    """Messages of one socket."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: deque[Message] = deque()
        self._room = _AHEAD_BYTES

    async def take(self) -> Message:
        """Return the next message."""
        if not self._ahead:
            return await self._receive()
        message = self._ahead.popleft()
        self._room += _size(message)
        return message

    async def rest(self, seconds: float) -> None:
        """Take nothing for a while; it ends early when the socket does, and what came before that is dropped."""
        with anyio.move_on_after(seconds):
            while self._room > 0:
                message = await self._receive()
                if message["type"] != "websocket.receive":
                    self._ahead.clear()
                    self._ahead.append(message)
                    return
                self._ahead.append(message)
                self._room -= _size(message)
            await anyio.sleep_forever()

    async def rest_until(self, is_time: Callable[[], Awaitable[None]]) -> None:
        """Take nothing until it is time; ends early as `rest`."""
        async with anyio.create_task_group() as tasks:

            async def wake() -> None:
                await is_time()
                tasks.cancel_scope.cancel()

            tasks.start_soon(wake)
            await self.rest(math.inf)
            tasks.cancel_scope.cancel()


def _size(message: Message) -> int:
    return _MESSAGE_BYTES + len(message.get("bytes") or message.get("text") or b"")


class Outbox:
    """Answers of one socket that wait for being sent, and how much there is of them and of what they answer."""

    def __init__(self, backlog: Backpressure, link: WebSocketFlow | None) -> None:
        self.owed = 0
        """Frames that came and whose answers were not sent."""
        self._backlog = backlog
        self._link = link
        self._unread_bytes = 0
        self._asked_bytes = 0
        self._is_over = False
        self._answers: list[bytes] = []
        # asyncio's, as the server's loop is: anyio's cannot be cleared, and a new one for each message costs more.
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()

    def put(self, *answers: bytes) -> None:
        if self._is_over or not answers:  # nobody is there to take them
            return
        if not self._answers:
            self._filled.set()
        self._answers += answers
        self._unread_bytes += sum(map(len, answers))
        if self._unread_bytes > UNCOUNTED_BYTES:
            self._count()

    def put_and_forget(self, size: int, answer: bytes) -> None:
        """Put in the answer to what was remembered."""
        self.put(answer)
        self.forget(size)

    def remember(self, size: int) -> None:
        """Count what a frame takes that is not answered at once."""
        self._asked_bytes += size
        if self._asked_bytes > UNCOUNTED_BYTES:
            self._count()

    def forget(self, size: int) -> None:
        """Count that no more."""
        if size:
            self._asked_bytes -= size
            if self._backlog.count:
                self._count()
                self._emptied.set()

    def _count(self) -> None:
        self._backlog.hold(self._asked_bytes + self._unread_bytes)

    @property
    def is_behind(self) -> bool:
        """Whether more answers are owed, or there are more bytes, than may be."""
        return self.owed > MAX_OWED or self._unread_bytes > MAX_UNREAD_BYTES or self._backlog.is_too_much

    async def wait_for_room(self) -> None:
        """Wait until it is not behind."""
        while self.is_behind:
            await self._wait()

    async def wait_until_answered(self) -> None:
        """Wait until no answer is owed."""
        while self.owed:
            await self._wait()

    async def wait_for_reader(self) -> None:
        """Wait until there are no more bytes than may be that nobody has read."""
        while self.is_full:
            await self._wait()

    @property
    def is_full(self) -> bool:
        """Whether there are more bytes than may be that nobody has read."""
        return self._unread_bytes > UNCOUNTED_BYTES and (
            self._unread_bytes > MAX_UNREAD_BYTES or self._backlog.is_too_much
        )

    async def _wait(self) -> None:
        self._emptied.clear()
        with anyio.move_on_after(_LOOK_S):  # others may make room too
            await self._emptied.wait()

    async def run(self, send: Send) -> None:
        """Send what is put in, until cancelled or the socket is closed."""
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                answers, self._answers = self._answers, []
                size = self._unread_bytes
                for batch in batches(answers, _BATCH_BYTES):
                    await send({"type": "websocket.send", "bytes": batch})
                if size > UNCOUNTED_BYTES and self._link is not None:
                    await self._link.drained()
                self._sent(len(answers), size)
        except OSError:  # closed meanwhile, which `receive` reports too
            pass
        finally:
            self._is_over = True
            self._answers = []
            self._sent(self.owed, self._unread_bytes)

    def _sent(self, count: int, size: int) -> None:
        self.owed -= count
        self._unread_bytes -= size
        if self._backlog.count:
            self._count()
        self._emptied.set()
