"""ASGI types, the handlers of operations, and helpers that answer requests without the overhead of a web framework."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qsl

import anyio
import msgspec

from envkit.errors import RequestError, TooLargeError, did_you_mean
from envkit.http.auth.caller import Caller
from envkit.http.protocol.decode_errors import explained
from envkit.http.protocol.messages import UNREADABLE, Problem, write
from envkit.http.protocol.operations import Operation, Q, R
from envkit.http.protocol.sandbox_messages import Key

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Header: TypeAlias = tuple[bytes, bytes]

S = TypeVar("S")
M = TypeVar("M", bound=Callable[..., Any])

RETRY_AFTER_S = 1
"""Default value of the ``Retry-After`` header, in seconds."""

JSON = b"application/json"
PROBLEM = b"application/problem+json"


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        TooLargeError: The body, or its announced length, is larger than `limit` bytes.
        RequestError: The client disconnected before the end of the body.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    while (message := await receive())["type"] == "http.request":
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    raise RequestError("the request ended in the middle of its body; send it again")


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"the request is too large (limit {limit} bytes)")


async def respond(
    send: Send, body: bytes, *, status: int = 200, content_type: bytes = JSON, headers: Iterable[Header] = ()
) -> None:
    """Send a whole response."""
    length = b"%d" % len(body)
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", content_type), (b"content-length", length), *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel `scope` when the caller disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def parameters(operation: Operation[Any, Any], values: Mapping[str, str], scope: Scope) -> dict[str, Any]:
    """Return the fields of a request that are outside its body: in the path (`values`), the query or the key's header.

    Of a repeated query parameter, the last value counts. Raises `RequestError` if a parameter is missing or invalid.
    """
    query = scope.get("query_string", b"").decode("latin-1")
    try:
        given: dict[str, Any] = dict(parse_qsl(query, errors="surrogateescape", keep_blank_values=True))
    except ValueError as error:
        raise RequestError(f"the query cannot be parsed: {error}") from None
    for name in given:
        if name not in operation.queries:
            hint = did_you_mean(name, operation.queries)
            raise RequestError(f"unknown query parameter {name[:100]!r}{hint}")
    given |= values
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


class CallOutcome(NamedTuple):
    """The outcome of a call: its reply or its error, encoded as JSON.

    Attributes:
        body: The reply or the error.
        status: HTTP status of the response that contains the outcome.
        retry_after_s: Seconds until the caller should repeat the call; None if a repetition does not help.
        is_error: Whether `body` is an error, encoded as a `Problem`.
    """

    body: bytes
    status: int = 200
    retry_after_s: int | None = None
    is_error: bool = False

    @classmethod
    def failed(cls, problem: Problem) -> CallOutcome:
        """Return the outcome of a call that failed."""
        wait_s: float = problem.fields.get("wait_s", RETRY_AFTER_S)
        retry_after_s = max(RETRY_AFTER_S, math.ceil(wait_s)) if problem.retry else None
        return cls(write(problem), problem.status, retry_after_s, is_error=True)

    def of_model(self) -> CallOutcome:
        """Return an error as OpenAI's and Anthropic's clients read it."""
        problem = msgspec.json.decode(self.body, type=Problem)
        error = {"message": problem.detail, "type": problem.type, "code": problem.type}
        return self._replace(body=write({"type": "error", "error": error}), is_error=False)

    @property
    def framed(self) -> bytes:
        """The outcome as a JSON object with the field `result` or `error`, for a list of outcomes."""
        return (b'{"error":%b}' if self.is_error else b'{"result":%b}') % self.body

    def answer(self, frame_id: int | str | None) -> bytes:
        """Return the answer to a frame; `frame_id` is None if the id of the frame could not be read."""
        return b'{"id":%b,%b' % (write(frame_id), self.framed[1:])


async def respond_outcome(send: Send, outcome: CallOutcome, headers: Iterable[Header] = ()) -> None:
    """Send an outcome as a complete HTTP response. An error has the content type ``application/problem+json``."""
    after_s = outcome.retry_after_s
    if after_s is not None:
        headers = [*headers, (b"retry-after", b"%d" % after_s)]
    content_type = PROBLEM if outcome.is_error else JSON
    await respond(send, outcome.body, status=outcome.status, content_type=content_type, headers=headers)


_DISCONNECTED = CallOutcome(b"{}", 499)
"""The outcome of a call whose caller disconnected."""


async def until_disconnect(receive: Receive, work: Callable[[], Awaitable[CallOutcome]]) -> CallOutcome:
    """Run `work`, which must not raise, and return its result. If the caller disconnects, cancel `work`."""
    outcome = _DISCONNECTED
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_on_disconnect, receive, tasks.cancel_scope)
        outcome = await work()
        tasks.cancel_scope.cancel()
    return outcome


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
        """Return the body of the request; see `read_body`."""
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
