"""Binds the methods of the server's classes to the operations that they handle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from envkit.http.auth.caller import Caller
from envkit.http.protocol.asgi import CallOutcome, Message, Receive, Scope, Send, read_body
from envkit.http.protocol.operations import Operation, Q, R

S = TypeVar("S")
M = TypeVar("M", bound=Callable[..., Any])


@dataclass(slots=True)
class HttpCall:
    """One HTTP request for an operation, with the functions that receive its body and send its response."""

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


Handler: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
Handles: TypeAlias = Callable[[S, Q, Caller], Awaitable[R]]
HandlesHttp: TypeAlias = Callable[[S, Q, HttpCall], Awaitable[CallOutcome | None]]


def handles(operation: Operation[Q, R]) -> Callable[[Handles[S, Q, R]], Handles[S, Q, R]]:
    """Return a decorator for the method that handles `operation`. The API document contains the method's docstring."""
    return partial(_bind, operation)


def handles_http(operation: Operation[Q, Any]) -> Callable[[HandlesHttp[S, Q]], HandlesHttp[S, Q]]:
    """Return a decorator like `handles` for an operation that has only an HTTP route.

    The method returns the outcome of the call, or None if it has sent a response itself.
    """
    return partial(_bind, operation)


def _bind(operation: Operation[Any, Any], method: M) -> M:
    method.__dict__["operation"] = operation
    return method


def handlers_of(owner: object) -> Iterator[tuple[Operation[Any, Any], Handler]]:
    """Yield each operation that a method of `owner` handles, and this method, bound to `owner`."""
    for name, method in vars(type(owner)).items():
        operation = getattr(method, "operation", None)
        if isinstance(operation, Operation):
            yield operation, getattr(owner, name)
