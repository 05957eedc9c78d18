"""Binds the methods of the server's classes to the operations that they handle, and reads their HTTP parameters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec

from envkit.errors import RequestError, did_you_mean
from envkit.http.auth.caller import Caller
from envkit.http.limits.memory_budget import reservation_of
from envkit.http.protocol.asgi import CallOutcome, Message, Receive, Scope, Send, query_of, read_body
from envkit.http.protocol.decode_errors import explained
from envkit.http.protocol.messages import UNREADABLE
from envkit.http.protocol.operations import Operation
from envkit.http.protocol.sandbox_messages import Key

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R")
S = TypeVar("S")


@dataclass(slots=True)
class HttpCall:
    """The HTTP request of an operation whose request or reply is not one JSON object."""

    caller: Caller
    scope: Scope
    receive: Receive
    send_message: Send
    has_started: bool = False
    """Whether a response was started, so that an error can no longer be reported in it."""

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        self.has_started = True
        await self.send_message(message)

    async def body(self, limit: int) -> bytes:
        """Return the body of the request; see `envkit.http.protocol.asgi.read_body`."""
        return await read_body(self.scope, self.receive, limit)

    async def reserve(self, count: int) -> None:
        """Reserve memory for the body and the reply; see `envkit.http.limits.memory_budget.Reservation.reserve`."""
        await reservation_of(self.scope).reserve(count)


Handler: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
Handles: TypeAlias = Callable[[S, Q, Caller], Awaitable[R]]
HandlesHttp: TypeAlias = Callable[[S, Q, HttpCall], Awaitable[CallOutcome | None]]


def handles(operation: Operation[Q, R]) -> Callable[[Handles[S, Q, R]], Handles[S, Q, R]]:
    """Return a decorator for the method that handles an operation. Its docstring describes the operation."""

    def bind(method: Handles[S, Q, R]) -> Handles[S, Q, R]:
        method.__dict__["operation"] = operation
        return method

    return bind


def handles_http(operation: Operation[Q, Any]) -> Callable[[HandlesHttp[S, Q]], HandlesHttp[S, Q]]:
    """Return a decorator like `handles` for an operation that has only an HTTP route.

    The method returns the outcome of the call, or None if it has sent a response itself.
    """

    def bind(method: HandlesHttp[S, Q]) -> HandlesHttp[S, Q]:
        method.__dict__["operation"] = operation
        return method

    return bind


def handlers_of(owner: object) -> Iterator[tuple[Operation[Any, Any], Handler]]:
    """Yield the operations that the methods of `owner` handle, with their bound methods."""
    for name, method in vars(type(owner)).items():
        operation = getattr(method, "operation", None)
        if isinstance(operation, Operation):
            yield operation, getattr(owner, name)


def parameters(operation: Operation[Any, Any], values: Mapping[str, str], scope: Scope) -> dict[str, Any]:
    """Return the fields of a request that are in the path, the query or a header.

    Raises:
        RequestError: A parameter is missing, unknown or not valid.
    """
    given: dict[str, Any] = dict(values)
    if scope.get("query_string"):
        for name, value in query_of(scope).items():
            if name not in operation.queries:
                hint = did_you_mean(name, operation.queries)
                raise RequestError(f"unknown query parameter {name[:100]!r}{hint}")
            given[name] = value
    checked = _converted(given, operation.parameters, strict=False)
    given = {name: getattr(checked, name) for name in checked.__struct_fields__}
    if operation.has_key:
        found = next((value for name, value in scope["headers"] if name == b"idempotency-key"), None)
        given["key"] = None if found is None else _converted(found.decode("latin-1"), Key, strict=True)
    return given


def _converted(value: object, kind: Any, *, strict: bool) -> Any:
    try:
        return msgspec.convert(value, kind, strict=strict)
    except UNREADABLE as error:
        raise RequestError(explained(error, b"?", kind)) from None
