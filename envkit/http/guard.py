"""The guard: stands before the application and decides who may ask for what, and how often.

A request shows its token as ``Authorization: Bearer ek_...``; the application finds who that is by
`envkit.http.callers.caller_of`. Without a store of tokens, as on a laptop, everybody may do everything. Every answer
names its request (``X-Request-Id``), by the caller's own name if that is a sane one.

A token that is revoked ends what is open under it: a socket at its next message, a stream at its next piece.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from typing import Protocol

import msgspec

from envkit import clock
from envkit.errors import EnvkitError, RateLimitError, UnauthorizedError, to_problem
from envkit.http import wire
from envkit.http.access_log import AccessLog
from envkit.http.asgi import Header, Message, Receive, Scope, Send, respond_problem
from envkit.http.callers import ADMIN, EVERYBODY, METRICS, NOBODY, PLAY, SANDBOX, Caller
from envkit.http.rates import Bucket, Rate
from envkit.http.tokens import TokenStore

MAX_SOCKETS = 256
"""Sockets that a tenant may have open, unless the caller of `Guard` says otherwise."""

_V1 = f"/v{wire.PROTOCOL}/"
_SCOPES = (
    (f"{_V1}sessions", PLAY),
    (wire.SOCKET_PATH, ""),  # each frame says what it needs
    (f"{_V1}sandboxes", SANDBOX),
    (f"{_V1}envs", PLAY),
    ("/metrics", METRICS),
    (_V1, ADMIN),  # events, and whatever has no line here
)
_OPEN = frozenset({f"{_V1}health", f"{_V1}ready"})
_REVOKED = 1008  # of RFC 6455: the message violates a policy
_CHALLENGE: Header = (b"www-authenticate", b"Bearer")
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Served(Protocol):
    """An application that a server can drain before it stops."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]: ...

    async def drain(self, timeout_s: float) -> None: ...


def scope_for(path: str) -> str | None:
    """Return the scope that a request needs; empty if any token will do, None if it needs no token."""
    if path in _OPEN:
        return None
    for prefix, scope in _SCOPES:
        if path.startswith(prefix):
            return scope
    return ""


class Guard:
    """Wraps an application.

    Args:
        app: What to guard.
        tokens: Whom to let in; None is everybody.
        rate: How many calls a tenant may make: requests, steps of a batch and frames of a socket count alike. A request
            beyond it is refused with 429; of a socket beyond it nothing is read for as long.
        max_sockets: Sockets that a tenant may have open.
        log: Where each request is written down, if anywhere.
    """

    def __init__(
        self,
        app: Served,
        tokens: TokenStore | None = None,
        *,
        rate: Rate | None = None,
        max_sockets: int = MAX_SOCKETS,
        log: AccessLog | None = None,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._rate = rate
        self._max_sockets = max_sockets
        self._log = log
        self._tenants: dict[str, _Tenant] = {}
        self._counted: dict[str, tuple[Caller, Caller]] = {}
        self._id_start = secrets.token_hex(4).encode()
        self._numbers = count(1)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        kind = scope["type"]
        if kind == "http":
            return self._request(scope, receive, send)
        if kind == "websocket":
            return self._socket(scope, receive, send)
        return self._app(scope, receive, send)

    async def drain(self, timeout_s: float) -> None:
        """See `envkit.http.app.App.drain`."""
        await self._app.drain(timeout_s)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(self, scope, receive, send)
        try:
            try:
                self._admit(exchange, scope)
            except EnvkitError as error:
                await _refuse(exchange.send, error)
            else:
                await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            if not exchange.is_cut:
                exchange.status = exchange.status or HTTPStatus.INTERNAL_SERVER_ERROR  # what the server then says
                raise
            await send({"type": "http.response.body", "body": b""})
        finally:
            if self._log is not None:
                exchange.write(self._log, scope["method"])

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _SocketExchange(self, scope, receive, send)
        tenant: _Tenant | None = None
        try:
            try:
                self._admit(exchange, scope)
                tenant = self._enter(exchange.caller.tenant)
            except EnvkitError as error:
                await receive()
                await _refuse(exchange.deny, error)
            else:
                await self._app(scope, exchange.receive, exchange.send)
        finally:
            if tenant is not None:
                tenant.sockets -= 1
            if self._log is not None:
                exchange.write(self._log, "WS", (exchange.messages_in, exchange.messages_out))

    def is_good(self, token: str | None) -> bool:
        """Say whether `token` is valid, and still was a moment ago."""
        return self._tokens is None or (token is not None and self._tokens.check(token) is not None)

    def new_id(self) -> bytes:
        return b"%b-%x" % (self._id_start, next(self._numbers))

    def _admit(self, exchange: _Exchange, scope: Scope) -> None:
        """Find out who asks, and tell the application.

        Raises:
            UnauthorizedError: There is no token, or it is not valid.
            ForbiddenError: It does not have the scope that is needed.
            RateLimitError: The tenant asks too often.
        """
        caller = EVERYBODY
        if self._tokens is not None:
            needed = scope_for(exchange.path)
            if needed is None:
                caller = NOBODY
            else:
                caller = exchange.caller = self._known(exchange.token, self._tokens)
                if needed:
                    caller.require(needed)
        if self._rate is not None and caller is not NOBODY:
            caller = self._with_bucket(caller, self._rate)
            caller.take()
        exchange.caller = caller
        scope.setdefault("state", {})["caller"] = caller

    def _known(self, token: str | None, tokens: TokenStore) -> Caller:
        if token is None:
            raise UnauthorizedError(
                "this needs a token: send 'Authorization: Bearer ek_...'; envkit's client takes it from ENVKIT_TOKEN"
            )
        caller = tokens.check(token)
        if caller is None:
            raise UnauthorizedError("the token is not valid: it was never made, was revoked or has expired")
        return caller

    def _with_bucket(self, caller: Caller, rate: Rate) -> Caller:
        known = self._counted.get(caller.token_id)
        if known is None or known[0] is not caller:
            tenant = self._tenant(caller.tenant)
            if tenant.bucket is None:
                tenant.bucket = Bucket(rate, clock.stopwatch())
            known = self._counted[caller.token_id] = caller, dataclasses.replace(caller, bucket=tenant.bucket)
        return known[1]

    def _tenant(self, name: str) -> _Tenant:
        return self._tenants.setdefault(name, _Tenant())

    def _enter(self, name: str) -> _Tenant:
        """Count one more socket of a tenant.

        Raises:
            RateLimitError: It has as many as it may.
        """
        tenant = self._tenant(name)
        if tenant.sockets >= self._max_sockets:
            raise RateLimitError(f"{tenant.sockets} sockets are open, which is all that a tenant may have; close some")
        tenant.sockets += 1
        return tenant


@dataclass(slots=True)
class _Tenant:
    sockets: int = 0
    bucket: Bucket | None = None


class _Exchange:
    """One request: who makes it, what it is called, and what goes in and out."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.token: str | None = None
        self.caller = NOBODY
        self.is_cut = False
        """Whether it was ended because its token was revoked."""
        self._guard = guard
        self._began = clock.stopwatch()
        self._receive = receive
        self._send = send
        self.status = self._bytes_in = self._bytes_out = 0
        self._id = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                if value[:7].lower() == b"bearer ":
                    self.token = value[7:].strip().decode("latin-1")
            elif name == b"x-request-id" and _SANE_ID.fullmatch(value):
                self._id = value
        if not self._id:
            self._id = guard.new_id()

    async def receive(self) -> Message:
        message = await self._receive()
        self._bytes_in += len(message.get("body", b""))
        return message

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.body":
            self._bytes_out += len(message.get("body", b""))
            if message.get("more_body") and self._is_revoked():
                self.is_cut = True
                raise OSError("the token was revoked")  # as if the client had gone
        else:
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self._id)]
        return self._send(message)

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
        )

    def _is_revoked(self) -> bool:
        return bool(self.caller.token_id) and not self._guard.is_good(self.token)


class _SocketExchange(_Exchange):
    """One socket."""

    messages_in = messages_out = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "websocket.receive":
            self.messages_in += 1
            self._bytes_in += _size(message)
            if self._is_revoked():
                await self._cut()
                return {"type": "websocket.disconnect", "code": _REVOKED}
        return message

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "websocket.send":
            self.messages_out += 1
            self._bytes_out += _size(message)
            if self._is_revoked():
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
        return self._send({**message, "type": f"websocket.{message['type']}"})

    async def _cut(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            await self._send({"type": "websocket.close", "code": _REVOKED, "reason": "the token was revoked"})


def _size(message: Message) -> int:
    return len(message.get("bytes") or message.get("text") or b"")


async def _refuse(send: Send, error: EnvkitError) -> None:
    problem = msgspec.convert(to_problem(error), wire.Problem)
    challenge = [_CHALLENGE] if isinstance(error, UnauthorizedError) else []
    await respond_problem(send, problem, challenge)
