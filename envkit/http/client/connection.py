"""A client's WebSocket, which many concurrent calls share. If it breaks, the client opens a new one.

All calls that begin in the same iteration of the event loop are sent in one message. When the socket breaks, the
unanswered calls are sent once more over a new socket; this is safe, because every call can be repeated. A call fails if
the new socket breaks too, or if the server stays unreachable. A single task checks the deadlines of all calls.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from envkit import clock
from envkit.errors import (
    DeadlineError,
    EnvkitError,
    ForbiddenError,
    RequestError,
    TooLargeError,
    UnauthorizedError,
    UnreachableError,
    from_problem,
)
from envkit.http.client.connect import Connector
from envkit.http.protocol.messages import MAX_MESSAGE_BYTES, Answer, batches, write
from envkit.http.protocol.operations import Operation, Q, R

RETRY_DELAYS_S = (0.05, 0.5)
"""Backoff: seconds before each attempt to reconnect."""

_MAX_SENDS = 2
_MIN_SWEEP_S, _MAX_SWEEP_S = 0.01, 0.5
_BATCH_BYTES = 1 << 19
_CLOSING_S = 1.0

_ANSWERS = msgspec.json.Decoder(list[Answer])
_ANSWER = msgspec.json.Decoder(Answer)
_PROBLEM = msgspec.json.Decoder(dict[str, Any])


class _PendingCall:
    __slots__ = ("deadline", "frame", "method", "outcome", "sends", "timeout_s")

    def __init__(self, method: str, frame: bytes, timeout_s: float) -> None:
        self.method = method
        self.frame = frame
        self.timeout_s = timeout_s
        self.deadline = clock.now() + timeout_s
        self.sends = 0
        # Use a future of asyncio, which is the cheapest way to wait. The WebSocket library requires asyncio anyway.
        self.outcome: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()

    def fail(self, error: EnvkitError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


class SharedWebSocket:
    """Sends the calls of many tasks to the server at `address` over a single WebSocket, which `connect` opens.

    Attributes:
        on_outage: Called with the error after the socket broke and each attempt to open a new one has failed.
    """

    def __init__(self, address: str, connect: Connector) -> None:
        self._address = address
        self._connect = connect
        self._number = 0
        self._calls: dict[int, _PendingCall] = {}
        self._unsent: list[int] = []
        # Not an anyio.Event, which cannot be cleared.
        self._has_unsent = asyncio.Event()
        self._shortest_s = _MAX_SWEEP_S
        self._is_closed = False
        self.on_outage: Callable[[EnvkitError], None] = lambda _: None

    async def call(self, operation: Operation[Q, R], request: Q, timeout_s: float) -> R:
        """Make a call, wait for its answer, and return the reply.

        Raises:
            DeadlineError: The server did not answer within `timeout_s` seconds.
            UnreachableError: The server is unreachable.
            RequestError: `request` cannot be encoded as JSON, or the answer is not valid.
            EnvkitError: The server answered with this error.
        """
        return self.decode(operation, await self.start_call(operation, request, timeout_s))

    def decode(self, operation: Operation[Any, R], answer: bytes | msgspec.Raw) -> R:
        """Decode the answer to a call of `operation`. Raises `RequestError` if it is not a valid reply."""
        try:
            return operation.reply_decoder.decode(answer)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{self._address} sent an invalid answer to {operation.name!r}: {error}") from None

    def start_call(self, operation: Operation[Q, R], request: Q, timeout_s: float) -> asyncio.Future[msgspec.Raw]:
        """Start a call. Return a future of its encoded answer, which may fail as `call` does, and may be cancelled.

        Raises:
            UnreachableError: The connection is closed.
            RequestError: `request` cannot be encoded as JSON.
            TooLargeError: The server would close the connection of all calls because of this one.
        """
        if self._is_closed:
            raise self._closed()
        self._number = number = self._number + 1
        frame = b'{"id":%d,"method":"%b","params":%b}' % (number, operation.name.encode(), write(request))
        if len(frame) > MAX_MESSAGE_BYTES:
            raise TooLargeError(f"the call is too large ({len(frame):,} bytes; limit {MAX_MESSAGE_BYTES:,} bytes)")
        self._calls[number] = call = _PendingCall(operation.name, frame, timeout_s)
        self._shortest_s = min(self._shortest_s, max(timeout_s / 4, _MIN_SWEEP_S))
        self._unsent.append(number)
        self._has_unsent.set()
        call.outcome.add_done_callback(partial(self._remove, number))
        return call.outcome

    def _remove(self, number: int, outcome: asyncio.Future[msgspec.Raw]) -> None:
        del self._calls[number]
        if not outcome.cancelled():
            # Read the exception; otherwise asyncio logs that it was never retrieved, if no caller waits any more.
            outcome.exception()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[TaskGroup]:
        """Connect to the server for the duration of the block, without retries at first.

        A cancellation of the surrounding task does not close the connection before the end of the block, because
        cancelled calls still use it to release what they have started.

        Yields:
            A task group, whose tasks are cancelled at the end of the block.

        Raises:
            UnreachableError: No server answers, or its answer is invalid.
            UnauthorizedError, ForbiddenError, RateLimitError: The server rejects the client.
        """
        socket = await connect_once(self._connect, self._address)
        scope = anyio.CancelScope(shield=True)

        async def run() -> None:
            with scope:
                await self._run(socket)

        async with clock.background_tasks() as tasks:
            tasks.start_soon(run)
            try:
                yield tasks
            finally:
                scope.cancel()

    async def _run(self, socket: ClientConnection) -> None:
        """Send calls and receive answers, first over `socket`, then over a new one when it breaks, until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._sweep)
                while True:
                    await self._run_socket(socket)
                    socket = await self._reopen()
        finally:
            self._is_closed = True
            self._fail_all(self._closed())

    async def _run_socket(self, socket: ClientConnection) -> None:
        """Send calls and receive answers until `socket` breaks, and then close it."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send, socket)
                with suppress(ConnectionClosed):
                    while True:
                        self._receive(await socket.recv(decode=False))
                tasks.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(_CLOSING_S, shield=True):
                await socket.close()
            # If the server has not completed the close handshake by now, end the connection without it.
            socket.transport.abort()

    async def _send(self, socket: ClientConnection) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            numbers, self._unsent = self._unsent, []
            calls = [
                call for number in numbers if (call := self._calls.get(number)) is not None and not call.outcome.done()
            ]
            for call in calls:
                call.sends += 1
            try:
                for message in batches([call.frame for call in calls], _BATCH_BYTES):
                    await socket.send(message)
            except ConnectionClosed:
                # `recv` raises the same error in `_run_socket`, which then ends, so that `_run` reconnects.
                return

    def _receive(self, message: bytes) -> None:
        try:
            answers = _ANSWERS.decode(message) if message[:1] == b"[" else [_ANSWER.decode(message)]
        except (ValueError, RecursionError) as error:
            self._fail_all(UnreachableError(f"{self._address} sent an invalid answer: {error}"))
            return
        for answer in answers:
            call = self._calls.get(answer.id) if isinstance(answer.id, int) else None
            if call is None or call.outcome.done():
                continue  # The call was cancelled or has failed, so no task waits for this answer.
            if answer.error is not None:
                call.fail(from_problem(answer.error))
            else:
                call.outcome.set_result(answer.result)

    async def _reopen(self) -> ClientConnection:
        """Open a new socket and queue the unanswered calls for it; a call that was already sent twice fails."""
        while True:
            for call in list(self._calls.values()):
                if call.sends >= _MAX_SENDS:
                    call.fail(UnreachableError(f"{self._address} closed the connection during {call.method!r} twice"))
            failure: EnvkitError = UnreachableError(f"{self._address} does not answer")
            for delay_s in RETRY_DELAYS_S:
                await anyio.sleep(delay_s)
                try:
                    socket = await connect_once(self._connect, self._address)
                except (UnauthorizedError, ForbiddenError) as error:
                    # A retry does not help, because the server would reject the same token again.
                    failure = error
                    break
                except EnvkitError as error:
                    failure = error
                else:
                    self._unsent = sorted(self._calls)
                    self._has_unsent.set()
                    return socket
            self.on_outage(failure)
            self._fail_all(failure)
            self._has_unsent.clear()
            await self._has_unsent.wait()

    async def _sweep(self) -> None:
        while True:
            if not self._calls:  # Without calls there are no deadlines to check, so sleep until the next call.
                await self._has_unsent.wait()
            await anyio.sleep(self._shortest_s)
            now = clock.now()
            for call in list(self._calls.values()):
                if now >= call.deadline:
                    call.fail(
                        DeadlineError(f"{self._address} did not answer {call.method!r} within {call.timeout_s:g} s")
                    )

    def _closed(self) -> UnreachableError:
        return UnreachableError(f"the connection to {self._address} was closed")

    def _fail_all(self, error: EnvkitError) -> None:
        for call in self._calls.values():
            call.fail(error)
        self._unsent = []


async def connect_once(connect: Connector, address: str) -> ClientConnection:
    """Open a WebSocket with `connect`, without retries. Raises the errors of `SharedWebSocket.connected`.

    `address` is the server's name in errors.
    """
    try:
        return await connect()
    except InvalidStatus as error:
        raise refusal(error.response.status_code, bytes(error.response.body or b""), address) from None
    except ssl.SSLCertVerificationError as error:
        remedy = "pass ca, a PEM file of certificates to trust"
        raise UnreachableError(f"{address}: {error.reason or error} ({error.verify_message}); {remedy}") from None
    except ssl.SSLError as error:
        raise UnreachableError(f"{address}: {error.reason or error}") from None
    except (OSError, EOFError, WebSocketException) as error:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnreachableError(f"{address} does not answer: {cause}") from None


def refusal(status_code: int, body: bytes, address: str) -> EnvkitError:
    """Return the error for the HTTP response with which a server has refused a request, or to open a WebSocket."""
    status = f"{address} answered with status {status_code}"
    try:
        error = from_problem(_PROBLEM.decode(body))
    except (ValueError, RecursionError):
        if status_code == HTTPStatus.UNAUTHORIZED:  # the answer is from a proxy in front of the server
            return UnauthorizedError(f"{status}: it requires authentication")
        return UnreachableError(f"{status}; check that an envkit server runs there")
    if isinstance(error, (UnauthorizedError, ForbiddenError)):
        return type(error)(f"{address}: {error.detail}")
    return error
