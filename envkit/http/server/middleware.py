"""Authorization middleware: checks the token, its scope and the tenant's limits before the application gets a request.

A request sends its token in the header ``Authorization: Bearer ek_...``; a browser that opens the status page may send
it as the password of HTTP Basic. `envkit.http.auth.caller.caller_of` returns the caller of a request to the
application. Until the first token is created, all programs on the machine may do everything; only web pages of other
sites in a browser are rejected. Every answer has the header ``X-Request-Id``. Its value is copied from the request if
the request has a valid one; otherwise it is new.

When a token is revoked, its open connections end: a WebSocket within a second, a stream at its next chunk. When the
first token is created, the open connections of callers without a token end in the same way.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Awaitable, Mapping
from http import HTTPStatus
from itertools import count
from typing import Protocol

import msgspec

from envkit.errors import EnvkitError, RateLimitError, RequestError, UnauthorizedError, to_problem
from envkit.http.api.status_page import CHALLENGE as CHALLENGE_OF_PAGE
from envkit.http.auth.caller import ADMIN, EVERYBODY, NOBODY, PLAY, Caller
from envkit.http.auth.localhost_only import require_local
from envkit.http.auth.tokens import OneToken, TokenStore
from envkit.http.protocol import messages
from envkit.http.protocol.asgi import CallOutcome, Header, Receive, Scope, Send, respond_outcome
from envkit.http.protocol.operations import OPERATIONS
from envkit.http.server.logs import BackgroundHandler
from envkit.http.server.request_context import RequestContext, WebSocketContext

MAX_SOCKETS = 256
"""Default limit on the open WebSockets of a tenant."""

MAX_REQUESTS = 2000
"""Default limit on the concurrent requests of a tenant: a fifth of the default limit on connections."""

_ROUTES = [one for one in OPERATIONS if one.verb]
_SCOPES: Mapping[str, str | None] = {
    messages.SOCKET_PATH: "",  # Each frame is checked for the scope that its call needs.
    "/openapi.json": None,
    **dict.fromkeys(messages.MODEL_PATHS, PLAY),
    **{one.path: one.scope for one in _ROUTES if "{" not in one.path},
}
"""The scope that each path without parameters needs; the values are those of `Operation.scope`."""

_PREFIXES = [(one.path.partition("{")[0], one.scope) for one in _ROUTES if "{" in one.path]
_PREFIX_SCOPES = tuple(dict(_PREFIXES).items())
_V1 = f"/v{messages.PROTOCOL}"
_OPTIONAL_TOKEN = frozenset({"/", _V1})
"""Paths that also answer requests without a token, but with less content."""
_CHALLENGE: Header = (b"www-authenticate", b"Bearer")
_TOO_MANY = {
    "requests": "too many concurrent requests (limit {} per tenant); retry later",
    "sockets": "too many open sockets (limit {} per tenant); close some",
}


class Served(Protocol):
    """An ASGI application. The server calls `drain` before it stops, to let running calls finish."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]: ...

    async def drain(self, timeout_s: float) -> None: ...


def scope_for(path: str) -> str | None:
    """Return the token scope that a path needs; an empty text if any token is enough, None if no token is needed."""
    for prefix, scope in _PREFIX_SCOPES:
        if path.startswith(prefix):
            return scope
    # Paths of the API that do not exist need the highest scope.
    return _SCOPES.get(path, ADMIN if path.startswith(f"{_V1}/") else "")


class AuthMiddleware:
    """ASGI middleware that authorizes requests.

    Args:
        app: The application that gets the authorized requests.
        tokens: Store of the tokens. If it is None or contains no token, every caller is admitted.
        max_sockets: Maximum number of open WebSockets of a tenant.
        max_requests: Maximum number of concurrent requests of a tenant; applies only if the server has tokens.
        log: Access log; None for no log.
        errors: Counter of error answers by code. Pass `App.errors`, so that it also counts those of the application.
    """

    def __init__(
        self,
        app: Served,
        tokens: TokenStore | OneToken | None = None,
        *,
        max_sockets: int = MAX_SOCKETS,
        max_requests: int = MAX_REQUESTS,
        log: BackgroundHandler | None = None,
        errors: Counter[str] | None = None,
    ) -> None:
        self._app = app
        self._errors: Counter[str] = Counter() if errors is None else errors
        self._tokens = tokens
        self._limits = {"requests": max_requests, "sockets": max_sockets}
        self._log = log
        self._running: Counter[tuple[str, str]] = Counter()
        """Numbers of concurrent requests and open WebSockets, by kind and tenant."""
        self._id_start = secrets.token_hex(4).encode()
        self._numbers = count(1)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        kind = scope["type"]
        if kind == "http":
            return self._serve(RequestContext(self.is_valid, self._new_id(), scope, receive, send))
        if kind == "websocket":
            return self._serve(WebSocketContext(self.is_valid, self._new_id(), scope, receive, send))
        return self._app(scope, receive, send)

    async def drain(self, timeout_s: float) -> None:
        """Let the running calls of the application finish; see `envkit.http.api.app.App.drain`."""
        await self._app.drain(timeout_s)

    async def _serve(self, context: RequestContext) -> None:
        slot: tuple[str, str] | None = None
        try:
            try:
                self._authorize(context)
                slot = self._take_slot(context)
            except EnvkitError as error:
                await self._refuse(context, error)
            else:
                await context.run(self._app)
        except Exception:
            # If the token was revoked, return without an error: uvicorn closes the connection, because the response
            # is incomplete. After any other error, uvicorn answers with status 500, so record this status for the log.
            if not context.is_aborted:
                context.status = context.status or HTTPStatus.INTERNAL_SERVER_ERROR
                raise
        finally:
            if slot is not None:
                self._running[slot] -= 1
            if self._log is not None:
                context.write(self._log)

    def is_valid(self, token: str | None) -> bool:
        """Return whether a request with this token is allowed; None means that the request has no token.

        The result may be up to half a second old.
        """
        tokens = self._required_tokens()
        return tokens is None or (token is not None and tokens.check(token) is not None)

    def _required_tokens(self) -> TokenStore | OneToken | None:
        """Return the token store if requests need a token; None if every caller is admitted."""
        return self._tokens if self._tokens is not None and self._tokens.is_needed() else None

    async def _refuse(self, context: RequestContext, error: EnvkitError) -> None:
        """Answer a request with an error, and count the error."""
        self._errors[error.code] += 1
        is_unauthorized = isinstance(error, UnauthorizedError)
        problem = msgspec.convert(to_problem(error), messages.Problem)
        challenge = CHALLENGE_OF_PAGE if context.path == "/" else _CHALLENGE
        outcome = CallOutcome.failed(problem)
        if context.path in messages.MODEL_PATHS:
            outcome = outcome.of_model()
        await respond_outcome(context.refuse, outcome, [challenge] if is_unauthorized else [])

    def _new_id(self) -> bytes:
        return b"%b-%x" % (self._id_start, next(self._numbers))

    def _authorize(self, context: RequestContext) -> None:
        """Check the token, its scope and, without tokens, the origin; store the caller in the state of the ASGI scope.

        Raises:
            RequestError: The request has several ``Authorization`` headers. This is rejected, because a proxy might
                have checked another header than the server.
        """
        if context.authorizations > 1:
            raise RequestError(f"the request has {context.authorizations} Authorization headers; send only one")
        caller, tokens = EVERYBODY, self._required_tokens()
        if tokens is None:
            require_local(context.scope.get("server"), context.host, context.origin)
        else:
            needed = scope_for(context.path)
            if needed is None or (context.token is None and context.path in _OPTIONAL_TOKEN):
                caller = NOBODY
            else:
                caller = context.caller = self._authenticate(context.token, tokens)
                if needed:
                    caller.require(needed)
        context.caller = caller
        context.scope.setdefault("state", {})["caller"] = caller

    def _authenticate(self, token: str | None, tokens: TokenStore | OneToken) -> Caller:
        if token is None:
            raise UnauthorizedError(
                "this call needs a token; send 'Authorization: Bearer ek_...', or set ENVKIT_TOKEN for envkit's client"
            )
        caller = tokens.check(token)
        if caller is None:
            raise UnauthorizedError("the token is not valid: it is unknown, revoked or expired; create a new one")
        return caller

    def _take_slot(self, context: RequestContext) -> tuple[str, str] | None:
        """Count one more running request or open WebSocket of the caller's tenant, and return the key of the counter.

        An HTTP request without a token is not counted, and None is returned. Raises `RateLimitError` at the limit.
        """
        kind = context.kind
        if kind == "requests" and not context.caller.token_id:
            return None
        slot = kind, context.caller.tenant
        if self._running[slot] >= self._limits[kind]:
            raise RateLimitError(_TOO_MANY[kind].format(self._limits[kind]))
        self._running[slot] += 1
        return slot
