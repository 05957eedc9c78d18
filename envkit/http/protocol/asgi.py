"""The little that is needed of ASGI where a framework would cost more than the work."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

import anyio

from envkit.errors import RequestError, TooLargeError
from envkit.http.protocol.messages import Problem, write

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Header: TypeAlias = tuple[bytes, bytes]

RETRY_AFTER_S = 1
"""Seconds that a caller is told to wait before it asks again."""

SILENT_S = 25.0
"""Seconds that a body may stop in its middle; less than callers wait for an answer."""

JSON = b"application/json"
PROBLEM = b"application/problem+json"


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        TooLargeError: It has, or announces, more than `limit` bytes.
        RequestError: The client went away before all of it came, or fell silent.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    message = await receive()  # without a bound, which would cost a fifth of a step; it has come as a rule
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
    """Return what comes next of a request's body.

    Raises:
        RequestError: Nothing came for `SILENT_S`.
    """
    with anyio.move_on_after(SILENT_S):
        return await receive()
    raise RequestError(f"nothing more of the body came for {SILENT_S:g} s")


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"a request may have {limit} bytes")


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives `body`, which was read already, and then goes on with the old one."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


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
    """Send a problem as a whole response."""
    again = [(b"retry-after", str(retry_after_s(problem)).encode())] if problem.retry else []
    await respond(send, write(problem), status=problem.status, content_type=PROBLEM, headers=[*headers, *again])


def retry_after_s(problem: Problem) -> int:
    """Seconds that a caller is told to wait before it asks again: what the error says, or `RETRY_AFTER_S`."""
    wait_s: float = problem.fields.get("wait_s", RETRY_AFTER_S)
    return max(RETRY_AFTER_S, math.ceil(wait_s))
