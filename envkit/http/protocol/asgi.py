"""ASGI types and helpers with which the server answers frequent requests, without the overhead of a web framework."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

import anyio

from envkit.errors import RequestError, TooLargeError
from envkit.http.limits.memory_budget import UNCOUNTED_BYTES, reservation_of
from envkit.http.protocol.messages import Problem, write

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Header: TypeAlias = tuple[bytes, bytes]

RETRY_AFTER_S = 1
"""Default of the ``Retry-After`` header, seconds."""

STALLED_S = 25.0
"""Seconds without data after which a body is rejected; clients wait longer than that for an answer."""

JSON = b"application/json"
PROBLEM = b"application/problem+json"


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        TooLargeError: The body, or its announced length, is larger than `limit` bytes.
        RequestError: The client disconnected before the end of the body, or sent nothing for `STALLED_S` seconds.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            if int(value) > limit:
                raise _too_large(limit)
            if int(value) > UNCOUNTED_BYTES:
                await reservation_of(scope).reserve(int(value))
    pieces: list[bytes] = []
    size = 0
    # Wait for the first chunk without a timeout: it has usually arrived already, and a timeout would make a step a
    # fifth slower.
    message = await receive()
    while message["type"] == "http.request":
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        message = await receive_piece(receive)
    raise RequestError("the request ended in the middle of its body")


async def receive_piece(receive: Receive) -> Message:
    """Return the next chunk of a request's body.

    Raises:
        RequestError: No data arrived for `STALLED_S` seconds.
    """
    with anyio.move_on_after(STALLED_S):
        return await receive()
    raise RequestError(f"the body stalled: no data for {STALLED_S:g} s; send it again")


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"the request is too large (limit {limit} bytes)")


def replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` function that returns `body` first, and then what the given `receive` returns.

    With it, an application can read a body that was already received.
    """
    is_replayed = False

    async def replayed() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


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


async def respond_problem(send: Send, problem: Problem, headers: Iterable[Header] = ()) -> None:
    """Send an error as a complete response in the format ``application/problem+json``."""
    retry_after = [(b"retry-after", str(retry_after_s(problem)).encode())] if problem.retry else []
    await respond(send, write(problem), status=problem.status, content_type=PROBLEM, headers=[*headers, *retry_after])


def retry_after_s(problem: Problem) -> int:
    """Return the value of the ``Retry-After`` header for an error: seconds, at least `RETRY_AFTER_S`."""
    wait_s: float = problem.fields.get("wait_s", RETRY_AFTER_S)
    return max(RETRY_AFTER_S, math.ceil(wait_s))
