"""What the middleware knows about one request: its caller, its request id, and the bytes received and sent."""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from logging import makeLogRecord
from typing import Any

import anyio

from envkit import clock
from envkit.errors import EnvkitError
from envkit.http.auth.caller import NOBODY
from envkit.http.protocol.asgi import ASGIApp, Message, Receive, Scope, Send
from envkit.http.protocol.messages import MODEL_PATHS
from envkit.http.server.logs import BackgroundHandler

_REVOKED = 1008  # RFC 6455: policy violation
_CHECK_INTERVAL_S = 0.3
"""Seconds between checks of an open socket's token. The sum with `envkit.http.auth.tokens.FRESH_S` must be less than
a second, because the sockets of a revoked token must be closed within a second.
"""

_MAX_PATH = 200
"""Characters of a path after which the access log cuts it."""

_ITEMS = {"sessions": "session", "sandboxes": "sandbox"}
"""Name of the field of the access log that contains the id after this part of a path."""

BROWSER_PATHS = frozenset({"/", "/metrics"})
"""Paths for which the password of HTTP Basic is accepted as the token: the status page, and a page that it links to. No
other path, because browsers also send the password with requests that web pages of other sites make."""

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestContext:
    """One HTTP request. `is_valid` returns whether a request with this token is allowed."""

    kind = "requests"

    def __init__(
        self, is_valid: Callable[[str | None], bool], new_id: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.path: str = scope["path"]
        self.token: str | None = None
        self.authorizations = 0
        self.caller = NOBODY
        self.is_aborted = False
        """Whether the reply ended early because the token of the request was revoked."""
        self.scope = scope
        self._is_valid = is_valid
        self._began = clock.stopwatch()
        self._receive = receive
        self._send = send
        self.status = self._bytes_in = self._bytes_out = 0
        self._id = self.host = b""
        self.origin: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                self.authorizations += 1
                if value[:7].lower() == b"bearer ":
                    self.token = value[7:].strip().decode("latin-1")
                elif self.path in BROWSER_PATHS and value[:6].lower() == b"basic ":
                    self.token = _password(value[6:])
            elif name == b"x-api-key" and self.path in MODEL_PATHS:  # of Anthropic's clients
                self.token = self.token or value.decode("latin-1")
            elif name == b"host":
                self.host = value
            elif name == b"origin":
                self.origin = value
            elif name == b"x-request-id" and _SANE_ID.fullmatch(value):
                self._id = value
        if not self._id:
            self._id = new_id

    def run(self, app: ASGIApp) -> Awaitable[None]:
        """Let `app` answer the request."""
        return app(self.scope, self.receive, self.send)

    async def receive(self) -> Message:
        message = await self._receive()
        self._bytes_in += len(message.get("body", b""))
        return message

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.body":
            if self.is_aborted or (message.get("more_body") and self.is_revoked()):
                self.is_aborted = True
                # Raise OSError, as after a disconnect of the client, so that the application stops sending.
                raise OSError("the token was revoked")
            self._bytes_out += len(message.get("body", b""))
        else:
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self._id)]
        return self._send(message)

    def refuse(self, message: Message) -> Awaitable[None]:
        """Send a part of a response that rejects the request."""
        return self.send(message)

    def write(self, log: BackgroundHandler) -> None:
        """Write a line of the access log when the request or WebSocket has ended.

        The fields: `at` and `time` (when it ended, in seconds since 1970 and in ISO 8601), `id` (of the request),
        `status` (0: no answer was sent), `ms` (duration), `in` and `out` (bytes of bodies or messages). Headers and the
        query are missing, because they may contain tokens.
        """
        at = round(clock.wall(), 3)
        fields: dict[str, Any] = {
            "at": at,
            "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "id": self._id.decode(),
            "tenant": self.caller.tenant,
            "method": self.scope.get("method", "WS"),
            "path": self.path[:_MAX_PATH],
            "status": self.status,
            "ms": round((clock.stopwatch() - self._began) * 1000, 3),
            "in": self._bytes_in,
            "out": self._bytes_out,
        }
        parts = fields["path"].split("/", 4)
        if len(parts) > 3 and parts[2] in _ITEMS:
            fields[_ITEMS[parts[2]]] = parts[3]
        log.handle(makeLogRecord({"msg": fields}))

    def is_revoked(self) -> bool:
        return self.caller is not NOBODY and not self._is_valid(self.token)


class WebSocketContext(RequestContext):
    """One WebSocket."""

    kind = "sockets"

    async def run(self, app: ASGIApp) -> None:
        """Let `app` use the WebSocket until the WebSocket closes or its token is revoked."""
        with anyio.CancelScope() as until_revoked:
            async with clock.background_tasks() as tasks:
                tasks.start_soon(self._monitor_token, until_revoked)
                await app(self.scope, self.receive, self.send)

    async def receive(self) -> Message:
        while True:
            message = await self._receive()
            if message["type"] != "websocket.receive":
                return message
            self._bytes_in += _size(message)
            if not self.is_revoked():  # otherwise ignore the message: `_monitor_token` closes the WebSocket
                return message

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "websocket.send":
            self._bytes_out += _size(message)
        elif kind == "websocket.accept":
            self.status = 101
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id)]
        await self._send(message)

    async def refuse(self, message: Message) -> None:
        """Send a part of an HTTP response that rejects the WebSocket instead of opening it."""
        if message["type"] == "http.response.start":
            await self._receive()
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self._id)]
        self._bytes_out += len(message.get("body", b""))
        await self._send({**message, "type": f"websocket.{message['type']}"})

    async def _monitor_token(self, scope: anyio.CancelScope) -> None:
        """Wait until the token is revoked; then close the WebSocket and cancel `scope`."""
        is_over = False
        while not is_over:
            await anyio.sleep(_CHECK_INTERVAL_S)
            try:
                is_over = self.is_revoked()
            except EnvkitError:
                # The token store cannot be read, so the token may be revoked: end the connection.
                is_over = True
        await self._send({"type": "websocket.close", "code": _REVOKED, "reason": "the token was revoked"})
        scope.cancel()


def _password(credentials: bytes) -> str | None:
    """Return the password in the credentials of HTTP Basic; None if they are invalid."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode("latin-1").partition(":")[2]
    except ValueError:
        return None


def _size(message: Message) -> int:
    return len(message.get("bytes") or message.get("text") or b"")
