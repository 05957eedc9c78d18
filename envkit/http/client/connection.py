"""The client's side of a WebSocket: one, shared by many calls, and made again when it breaks.

Calls that are made in one turn of the event loop travel in one message. When the socket breaks, calls without an answer
are sent once more over a new one, which is safe because every call may be repeated. A call that broke two sockets, or
whose server cannot be reached again, fails. One sweeper looks after the deadlines of all calls.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

import anyio
import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.http11 import Response

from envkit import clock
from envkit.errors import (
    DeadlineError,
    EnvkitError,
    ForbiddenError,
    UnauthorizedError,
    UnreachableError,
    from_problem,
)
from envkit.http.client.connect import Dial, distrust
from envkit.http.protocol.messages import Answer, batches, write

RETRY_DELAYS_S = (0.05, 0.5)
"""Seconds before each attempt to connect again, in a row, after a socket broke."""

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
        # The socket's library is asyncio's, and a future is the cheapest thing to wait for there.
        self.outcome: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()

    def fail(self, error: EnvkitError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


class SharedWebSocket:
    """Carries calls to one server.

    Args:
        address: How errors name the server.
        connect: Gives a new, open WebSocket.
    """

    def __init__(self, address: str, connect: Dial) -> None:
        self._address = address
        self._connect = connect
        self._number = 0
        self._calls: dict[int, _PendingCall] = {}
        self._unsent: list[int] = []
        self._filled = asyncio.Event()  # anyio's cannot be cleared, and a new one for each message costs more
        self._shortest_s = _MAX_SWEEP_S
        self._is_closed = False

    async def call(self, method: str, params: msgspec.Struct, timeout_s: float) -> msgspec.Raw:
        """Make a call and return its result, as JSON.

        Raises:
            DeadlineError: There was no answer within `timeout_s`.
            UnreachableError: The server is gone.
            RequestError: `params` cannot be said in JSON.
            EnvkitError: Whatever the server answered.
        """
        return await self.start_call(method, params, timeout_s)

    def start_call(self, method: str, params: msgspec.Struct, timeout_s: float) -> asyncio.Future[msgspec.Raw]:
        """Make a call whose result, or error, the future is given; see `call`. It may be cancelled.

        Raises:
            UnreachableError: We are closed.
            RequestError: `params` cannot be said in JSON.
        """
        if self._is_closed:
            raise self._closed()
        self._number = number = self._number + 1
        frame = b'{"id":%d,"method":"%b","params":%b}' % (number, method.encode(), write(params))
        self._calls[number] = call = _PendingCall(method, frame, timeout_s)
        self._shortest_s = min(self._shortest_s, max(timeout_s / 4, _MIN_SWEEP_S))
        self._unsent.append(number)
        self._filled.set()
        call.outcome.add_done_callback(partial(self._forget, number))
        return call.outcome

    def _forget(self, number: int, outcome: asyncio.Future[msgspec.Raw]) -> None:
        del self._calls[number]
        if not outcome.cancelled():
            outcome.exception()  # seen, even if who asked was cancelled in the same moment

    async def open(self) -> ClientConnection:
        """Connect once.

        Raises:
            UnreachableError: Nothing answers, or not what is expected.
            UnauthorizedError, ForbiddenError, RateLimitError: The server answers, and refuses us.
        """
        try:
            return await self._connect()
        except InvalidStatus as error:
            raise self._refusal(error.response) from None
        except ssl.SSLError as error:
            raise UnreachableError(f"{self._address}: {error.reason or error}{distrust(error)}") from None
        except (OSError, EOFError, WebSocketException) as error:
            cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UnreachableError(f"{self._address} does not answer: {cause}") from None

    async def run(self, socket: ClientConnection) -> None:
        """Carry calls over `socket`, and over others after it, until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._sweep)
                while True:
                    await self._talk(socket)
                    socket = await self._reopen()
        finally:
            self._is_closed = True
            self._fail_all(self._closed())

    async def _talk(self, socket: ClientConnection) -> None:
        """Carry calls until `socket` breaks, and close it."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send, socket)
                with suppress(ConnectionClosed):
                    while True:
                        self._take(await socket.recv(decode=False))
                tasks.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(_CLOSING_S, shield=True):
                await socket.close()
            socket.transport.abort()  # a server that is silent says no farewell

    async def _send(self, socket: ClientConnection) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            numbers, self._unsent = self._unsent, []
            calls = [
                call for number in numbers if (call := self._calls.get(number)) is not None and not call.outcome.done()
            ]
            for call in calls:
                call.sends += 1
            try:
                for message in batches([call.frame for call in calls], _BATCH_BYTES):
                    await socket.send(message)
            except ConnectionClosed:  # `recv` says so too
                return

    def _take(self, message: bytes) -> None:
        try:
            answers = _ANSWERS.decode(message) if message[:1] == b"[" else [_ANSWER.decode(message)]
        except (ValueError, RecursionError) as error:
            self._fail_all(UnreachableError(f"{self._address} answers what is no answer: {error}"))
            return
        for answer in answers:
            call = self._calls.get(answer.id) if isinstance(answer.id, int) else None
            if call is None or call.outcome.done():
                continue  # nobody waits for it any more
            if answer.error is not None:
                call.fail(from_problem(answer.error))
            else:
                call.outcome.set_result(answer.result)

    async def _reopen(self) -> ClientConnection:
        """Connect again, as soon as that succeeds, and see to it that calls without an answer are sent again."""
        while True:
            for call in list(self._calls.values()):
                if call.sends >= _MAX_SENDS:
                    call.fail(UnreachableError(f"{self._address} broke the connection during {call.method!r}, twice"))
            failure: EnvkitError = UnreachableError(f"{self._address} does not answer")
            for delay_s in RETRY_DELAYS_S:
                await anyio.sleep(delay_s)
                try:
                    socket = await self.open()
                except (UnauthorizedError, ForbiddenError) as error:  # asking again does not help
                    failure = error
                    break
                except EnvkitError as error:
                    failure = error
                else:
                    self._unsent = sorted(self._calls)
                    self._filled.set()
                    return socket
            self._fail_all(failure)
            self._filled.clear()
            await self._filled.wait()

    async def _sweep(self) -> None:
        while True:
            if not self._calls:  # an idle client sleeps
                await self._filled.wait()
            await anyio.sleep(self._shortest_s)
            now = clock.now()
            for call in list(self._calls.values()):
                if now >= call.deadline:
                    call.fail(
                        DeadlineError(f"{self._address} did not answer {call.method!r} within {call.timeout_s:g} s")
                    )

    def _refusal(self, response: Response) -> EnvkitError:
        """Return what the server says instead of opening a socket."""
        says = f"{self._address} answers with status {response.status_code}"
        try:
            error = from_problem(_PROBLEM.decode(response.body or b""))
        except (ValueError, RecursionError):
            if response.status_code == HTTPStatus.UNAUTHORIZED:  # a proxy before it
                return UnauthorizedError(f"{says}: it wants to know who we are")
            return UnreachableError(f"{says}; is it an `envkit serve`?")
        if isinstance(error, (UnauthorizedError, ForbiddenError)):
            return type(error)(f"{self._address}: {error.detail}")
        return error

    def _closed(self) -> UnreachableError:
        return UnreachableError(f"the connection to {self._address} was closed")

    def _fail_all(self, error: EnvkitError) -> None:
        for call in self._calls.values():
            call.fail(error)
        self._unsent = []
