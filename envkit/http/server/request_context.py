"""A request as the guard sees it: who makes it, what it is called, and what goes in and out."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Sequence
from typing import Protocol

import anyio

from envkit import clock
from envkit.errors import EnvkitError
from envkit.http.auth.caller import NOBODY
from envkit.http.limits.memory_budget import UNCOUNTED_BYTES, Body, MemoryBudget, Reservation
from envkit.http.protocol.asgi import Header, Message, Receive, Scope, Send
from envkit.http.server.access_log import AccessLog
from envkit.http.sessions.counters import StepMetrics

_REVOKED = 1008  # of RFC 6455: the message violates a policy
_LOOK_S = 0.3
"""Seconds between looks at the token of an open socket. With `envkit.http.auth.tokens.FRESH_S` it is less than the
second within which a revoked token ends its sockets.
"""

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Authorizer(Protocol):
    """What a request asks of the guard."""

    @property
    def bodies(self) -> MemoryBudget: ...

    def new_id(self) -> bytes:
        """Return a name for a request that has none of its own."""
        ...

    def is_good(self, token: str | None) -> bool:
        """Say whether a request with this token may still be made."""
        ...

    async def refuse(self, send: Send, error: EnvkitError) -> None:
        """Answer with a problem."""
        ...


class RequestContext:
    """One request: who makes it, what it is called, and what goes in and out."""

    def __init__(self, judge: Authorizer, scope: Scope, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.token: str | None = None
        self.authorizations = 0
        self.caller = NOBODY
        self.is_cut = False
        """Whether it was ended because its token was revoked."""
        self.played = StepMetrics()
        self._judge = judge
        self._began = clock.stopwatch()
        self._receive = receive
        self._send = send
        self.status = self._bytes_in = self._bytes_out = 0
        self._reach = UNCOUNTED_BYTES
        self._body: Body | None = None
        """What is larger than that."""
        self._room: Reservation | None = None
        self._is_large = self._is_refused = False
        self._headers: Sequence[Header] = scope["headers"]
        self._id = self.host = b""
        self.origin: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                self.authorizations += 1
                if value[:7].lower() == b"bearer ":
                    self.token = value[7:].strip().decode("latin-1")
            elif name == b"host":
                self.host = value
            elif name == b"origin":
                self.origin = value
            elif name == b"x-request-id" and _SANE_ID.fullmatch(value):
                self._id = value
        if not self._id:
            self._id = judge.new_id()

    async def receive(self) -> Message:
        message = await self._receive()
        self._bytes_in += len(message.get("body", b""))
        if self._bytes_in > self._reach:
            if self._body is None:
                self._body = self._judge.bodies.begin(self.room(), self.path, self._headers)
            self._reach = await self._body.reach(self._bytes_in)
        return message

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.body":
            if self.is_cut or (message.get("more_body") and self.is_revoked()):
                self.is_cut = True
                raise OSError("the token was revoked")  # as if the client had gone
            if self._is_large:
                return self._send_large(message)
            self._bytes_out += len(message.get("body", b""))
        else:
            self.status = message["status"]
            size = _length(message["headers"])
            message["headers"] = [*message["headers"], (b"x-request-id", self._id)]
            if size > UNCOUNTED_BYTES:
                return self._begin_large(message, size)
            if self._room is not None:
                self._room.settle(0)
        return self._send(message)

    def room(self) -> Reservation:
        """Return what it has room for, beside what is small."""
        if self._room is None:
            self._room = self._judge.bodies.room(self.caller)
        return self._room

    def free(self) -> None:
        """Give its room back."""
        if self._room is not None:
            self._room.free()

    async def _begin_large(self, message: Message, size: int) -> None:
        """Begin an answer that is counted; one for which there is no room is refused, if nobody asked for that before.

        Those can be asked for again: they only tell how things are, or what a turn was answered.
        """
        room = self.room()
        if not room.is_expected:
            try:
                await room.expect(size, within_s=0)
            except EnvkitError as error:
                await self._judge.refuse(self.send, error)
                self._is_large = self._is_refused = True
                return
        room.settle(size)
        self._is_large = True
        await self._send(message)

    async def _send_large(self, message: Message) -> None:
        """Send a piece of such an answer, and return when the client has read nearly all of it."""
        if self._is_refused:
            return
        self._bytes_out += len(message.get("body", b""))
        await self._send({**message, "more_body": True})
        if not message.get("more_body"):
            await self._send({"type": "http.response.body", "body": b""})  # waits for what is before it

    def write(self, log: AccessLog, method: str, messages: tuple[int, int] | None = None) -> None:
        log.write(
            id=self._id.decode(),
            tenant=self.caller.tenant,
            method=method,
            path=self.path,
            status=self.status,
            seconds=clock.stopwatch() - self._began,
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            messages=messages,
            played=self.played,
        )

    def is_revoked(self) -> bool:
        return self.caller is not NOBODY and not self._judge.is_good(self.token)


class WebSocketContext(RequestContext):
    """One socket."""

    messages_in = messages_out = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "websocket.receive":
            self.messages_in += 1
            self._bytes_in += _size(message)
            if self.is_revoked():
                await self._cut()
                return {"type": "websocket.disconnect", "code": _REVOKED}
        return message

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "websocket.send":
            self.messages_out += 1
            self._bytes_out += _size(message)
            if self.is_revoked():
                await self._cut()
                raise OSError("the token was revoked")  # as if the client had gone
        elif kind == "websocket.accept":
            self.status = 101
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id)]
        await self._send(message)

    def deny(self, message: Message) -> Awaitable[None]:
        """Send a message of an HTTP response instead of opening the socket."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self._id)]
        self._bytes_out += len(message.get("body", b""))
        return self._send({**message, "type": f"websocket.{message['type']}"})

    async def watch(self, scope: anyio.CancelScope) -> None:
        """Close the socket and cancel `scope` when the token is revoked."""
        while True:
            await anyio.sleep(_LOOK_S)
            try:
                is_over = self.is_revoked()
            except EnvkitError:  # nobody can say
                is_over = True
            if is_over:
                await self._cut()
                scope.cancel()

    async def _cut(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            await self._send({"type": "websocket.close", "code": _REVOKED, "reason": "the token was revoked"})


def _length(headers: Sequence[Header]) -> int:
    """Return how long an answer says that it is; 0 where it does not."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return 0


def _size(message: Message) -> int:
    return len(message.get("bytes") or message.get("text") or b"")
