"""The guard: stands before the application and decides who may ask for what, and how often.

A request shows its token as ``Authorization: Bearer ek_...``; the application finds who that is by
`envkit.http.auth.caller.caller_of`. Until there is a token, as on a laptop, everybody on the machine may do everything,
but for web pages of others in its browser. Every answer names its request (``X-Request-Id``), by the caller's own name
if that is a sane one.

A token that is revoked, or is not there since there were none, ends what is open under it: a socket within a second, a
stream at its next piece, which then breaks off.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from typing import Protocol

import anyio
import msgspec

from envkit import clock
from envkit.errors import EnvkitError, RateLimitError, RequestError, UnauthorizedError, to_problem
from envkit.http.auth.caller import ADMIN, EVERYBODY, METRICS, NOBODY, PLAY, SANDBOX, Caller
from envkit.http.auth.localhost_only import require_local
from envkit.http.auth.rate_limit import Bucket, Rate
from envkit.http.auth.tokens import TokenStore
from envkit.http.limits.memory_budget import MemoryBudget
from envkit.http.protocol import messages
from envkit.http.protocol.asgi import Header, Receive, Scope, Send, respond_problem
from envkit.http.server.access_log import AccessLog
from envkit.http.server.request_context import RequestContext, WebSocketContext

MAX_SOCKETS = 256
"""Sockets that a tenant may have open, unless the caller of `AuthMiddleware` says otherwise."""

MAX_REQUESTS = 2000
"""Requests of a tenant that are under way at once, likewise: a fifth of what a server takes of all."""

_V1 = f"/v{messages.PROTOCOL}/"
_SCOPES = (
    (f"{_V1}sessions", PLAY),
    (messages.SOCKET_PATH, ""),  # each frame says what it needs
    (f"{_V1}sandboxes", SANDBOX),
    (f"{_V1}snapshots", SANDBOX),
    (f"{_V1}envs", PLAY),
    ("/metrics", METRICS),
    (_V1, ADMIN),  # events, and whatever has no line here
)
_OPEN = frozenset({f"{_V1}health", f"{_V1}ready", "/openapi.json"})
_SHORTER_WITHOUT = frozenset({"/", _V1.rstrip("/")})
"""What is answered without a token as well, with less in it."""
_CHALLENGE: Header = (b"www-authenticate", b"Bearer")


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


class AuthMiddleware:
    """Wraps an application.

    Args:
        app: What to guard.
        tokens: Whom to let in; None is everybody, as is a store that never held one.
        rate: How many calls a tenant may make: requests, steps of a batch and frames of a socket count alike. A request
            beyond it is refused with 429; of a socket beyond it nothing is read for as long.
        max_sockets: Sockets that a tenant may have open.
        max_requests: Requests of a tenant that may be under way at once, where there are tokens.
        bodies: How much is held at once of the bodies of requests and answers, and for sockets; None for any.
        log: Where each request is written down, if anywhere.
        errors: Where refusals are counted by code, beside what the application counts; see `App.errors`.
    """

    def __init__(
        self,
        app: Served,
        tokens: TokenStore | None = None,
        *,
        rate: Rate | None = None,
        max_sockets: int = MAX_SOCKETS,
        max_requests: int = MAX_REQUESTS,
        bodies: MemoryBudget | None = None,
        log: AccessLog | None = None,
        errors: Counter[str] | None = None,
    ) -> None:
        self._app = app
        self._errors: Counter[str] = Counter() if errors is None else errors
        self._tokens = tokens
        self._rate = rate
        self._max_sockets = max_sockets
        self._max_requests = max_requests
        self.bodies = bodies or MemoryBudget()
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
        """See `envkit.http.api.app.App.drain`."""
        await self._app.drain(timeout_s)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = RequestContext(self, scope, receive, send)
        tenant: _Tenant | None = None
        try:
            try:
                self._admit(exchange, scope)
                if exchange.caller.token_id:
                    tenant = self._begin(exchange.caller.tenant)
            except EnvkitError as error:
                await self.refuse(exchange.send, error)
            else:
                await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            if not exchange.is_cut:  # else the server breaks the connection, as the answer has no end
                exchange.status = exchange.status or HTTPStatus.INTERNAL_SERVER_ERROR  # what the server then says
                raise
        finally:
            exchange.free()
            if tenant is not None:
                tenant.requests -= 1
            if self._log is not None:
                exchange.write(self._log, scope["method"])

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = WebSocketContext(self, scope, receive, send)
        tenant: _Tenant | None = None
        try:
            try:
                self._admit(exchange, scope)
                tenant = self._enter(exchange.caller.tenant)
            except EnvkitError as error:
                await receive()
                await self.refuse(exchange.deny, error)
            else:
                await self._talk(exchange, scope)
        finally:
            if tenant is not None:
                tenant.sockets -= 1
            if self._log is not None:
                exchange.write(self._log, "WS", (exchange.messages_in, exchange.messages_out))

    async def _talk(self, exchange: WebSocketContext, scope: Scope) -> None:
        """Serve a socket for as long as its token is good."""
        if self._tokens is None:
            await self._app(scope, exchange.receive, exchange.send)
            return
        with anyio.CancelScope() as until_revoked:
            tasks = await anyio.create_task_group().__aenter__()
            tasks.start_soon(exchange.watch, until_revoked)
            try:
                await self._app(scope, exchange.receive, exchange.send)
            finally:
                tasks.cancel_scope.cancel()
                # Not told of the block's own error, which it would wrap in a group.
                await tasks.__aexit__(None, None, None)

    def is_good(self, token: str | None) -> bool:
        """Say whether `token` is valid, and still was a moment ago; None is where no tokens are needed."""
        tokens = self._needed()
        return tokens is None or (token is not None and tokens.check(token) is not None)

    def _needed(self) -> TokenStore | None:
        """Return whom to let in; None is everybody."""
        return self._tokens if self._tokens is not None and self._tokens.is_needed() else None

    async def refuse(self, send: Send, error: EnvkitError) -> None:
        """Answer a request with a problem."""
        self._errors[error.code] += 1
        problem = msgspec.convert(to_problem(error), messages.Problem)
        challenge = [_CHALLENGE] if isinstance(error, UnauthorizedError) else []
        await respond_problem(send, problem, challenge)

    def new_id(self) -> bytes:
        return b"%b-%x" % (self._id_start, next(self._numbers))

    def _admit(self, exchange: RequestContext, scope: Scope) -> None:
        """Find out who asks, and tell the application.

        Raises:
            UnauthorizedError: There is no token, or it is not valid.
            ForbiddenError: It does not have the scope that is needed; or, without tokens, a web page of others asks.
            RateLimitError: The tenant asks too often.
            RequestError: There are several ``Authorization`` headers; a proxy and we might read different ones.
        """
        if exchange.authorizations > 1:
            raise RequestError(f"{exchange.authorizations} Authorization headers; send one")
        caller, tokens = EVERYBODY, self._needed()
        if tokens is None:
            require_local(scope.get("server"), exchange.host, exchange.origin)
        else:
            needed = scope_for(exchange.path)
            if needed is None or (exchange.token is None and exchange.path in _SHORTER_WITHOUT):
                caller = NOBODY
            else:
                caller = exchange.caller = self._known(exchange.token, tokens)
                if needed:
                    caller.require(needed)
        if self._rate is not None and caller is not NOBODY:
            caller = self._with_bucket(caller, self._rate)
            caller.take()
        exchange.caller = caller
        state = scope.setdefault("state", {})
        state["caller"] = caller
        state["played"] = exchange.played
        state["room"] = exchange.room
        state["bodies"] = self.bodies

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

    def _begin(self, name: str) -> _Tenant:
        """Count one more request of a tenant.

        Raises:
            RateLimitError: As many as it may have are under way.
        """
        tenant = self._tenant(name)
        if tenant.requests >= self._max_requests:
            raise RateLimitError(f"{tenant.requests} requests are under way, which is all that a tenant may have", 1.0)
        tenant.requests += 1
        return tenant

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
    requests: int = 0
    bucket: Bucket | None = None
