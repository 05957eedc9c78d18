"""The server's WebSocket endpoint: receives calls as frames and sends answers, for many sessions on one socket.

A call continues after its socket closes, so that the caller can reconnect and repeat the call. The exception is a call
about a sandbox: it is cancelled if it has no idempotency key. While a socket is open, the sessions and sandboxes that
were used over it do not expire. Answers that are ready in the same iteration of the event loop are sent in one message.

The server stops reading from a socket with more than `MAX_OWED` unanswered frames or `MAX_UNREAD_BYTES` of unread
answers. uvicorn in turn stops receiving while messages wait to be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from envkit.errors import EnvkitError, RequestError, TooLargeError, did_you_mean
from envkit.http.api.dispatcher import Dispatcher
from envkit.http.auth.caller import PLAY, SANDBOX, Caller
from envkit.http.protocol.asgi import CallOutcome, Receive, Send
from envkit.http.protocol.messages import MAX_FRAMES, UNREADABLE, Frame, StepFrame, batches, read, read_each
from envkit.http.protocol.operations import CREATE, METHODS, STEP, STOP, VIEW
from envkit.http.sandboxes.lifecycle import SandboxLifecycle
from envkit.types import TenantKey

MAX_OWED = 10_000
"""Number of unanswered frames above which the server stops reading from a socket."""

MAX_UNREAD_BYTES = 8 << 20
"""Bytes of unread answers above which the server stops reading from a socket."""

_BATCH_BYTES = 1 << 19
"""Bytes up to which answers are joined into one message: half of the default message limit of common clients."""

_RENEW_S = 1.0
"""Seconds between renewals of sandbox leases."""

_STEPS = msgspec.json.Decoder(list[StepFrame] | StepFrame)
_FRAME = msgspec.json.Decoder(Frame)
_FRAMES = msgspec.json.Decoder(list[Frame])


class Outbox:
    """The unsent answers of one socket, and the number of frames that are not answered yet."""

    def __init__(self) -> None:
        self.owed = 0
        """Number of received frames whose answers have not been sent."""
        self._unread_bytes = 0
        self._is_closed = False
        self._answers: list[bytes] = []
        # Use asyncio.Event: an anyio.Event cannot be cleared, and a new one for each message would cost more time.
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()

    def put(self, *answers: bytes) -> None:
        """Queue answers, which `run` sends."""
        if self._is_closed or not answers:
            return
        if not self._answers:
            self._filled.set()
        self._answers += answers
        self._unread_bytes += sum(map(len, answers))

    @property
    def is_full(self) -> bool:
        """Whether unanswered frames or unread answers exceed their limit."""
        return not self._is_closed and (self.owed > MAX_OWED or self._unread_bytes > MAX_UNREAD_BYTES)

    async def wait_until_sent(self) -> None:
        """Wait until answers have been sent, or the socket has closed."""
        self._emptied.clear()
        await self._emptied.wait()

    async def run(self, send: Send) -> None:
        """Send queued answers until cancelled or the socket closes."""
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                answers, self._answers = self._answers, []
                size = self._unread_bytes
                for batch in batches(answers, _BATCH_BYTES):
                    await send({"type": "websocket.send", "bytes": batch})
                self._sent(len(answers), size)
        except OSError:
            # The socket has closed. `receive` reports this to the reader of the socket, which then stops this task.
            pass
        finally:
            self._is_closed = True
            self._answers = []
            self._sent(self.owed, self._unread_bytes)

    def _sent(self, count: int, size: int) -> None:
        self.owed -= count
        self._unread_bytes -= size
        self._emptied.set()


@dataclass(slots=True, eq=False)
class _Socket:
    """One open WebSocket: its caller, the sessions and sandboxes that were used over it, and its unsent answers."""

    caller: Caller
    tasks: TaskGroup
    """Runs the calls that are cancelled when the socket closes."""
    outbox: Outbox
    sessions: set[TenantKey] = field(default_factory=set)
    sandboxes: set[str] = field(default_factory=set)


class Sockets:
    """All open WebSockets of a server.

    `tasks` runs the calls that continue after their socket closes. `sandboxes` renews the leases of the sandboxes that
    are used over the sockets; None if the server lends no sandboxes.
    """

    def __init__(
        self, dispatcher: Dispatcher, tasks: TaskGroup, max_frame_bytes: int, sandboxes: SandboxLifecycle | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._operations = dispatcher.operations
        self._tasks = tasks
        self._max_frame_bytes = max_frame_bytes
        self._sandboxes = sandboxes
        self._open: set[Outbox] = set()

    async def serve(self, caller: Caller, receive: Receive, send: Send) -> None:
        """Serve one socket until it closes. Pause reading from the socket while its caller exceeds a limit."""
        outbox = Outbox()
        await receive()
        await send({"type": "websocket.accept"})
        self._open.add(outbox)
        try:
            async with anyio.create_task_group() as tasks:
                socket = _Socket(caller, tasks, outbox)
                with self._operations.sessions.keep_alive(socket.sessions):
                    tasks.start_soon(outbox.run, send)
                    if self._sandboxes is not None:
                        tasks.start_soon(_renew, self._sandboxes, socket)
                    while (message := await receive())["type"] == "websocket.receive":
                        data = message.get("bytes") or (message.get("text") or "").encode()
                        self._dispatch(socket, data)
                        while outbox.is_full:
                            await outbox.wait_until_sent()
                    tasks.cancel_scope.cancel()
        finally:
            self._open.discard(outbox)

    async def answered(self) -> None:
        """Wait until all frames that were received over open sockets are answered."""
        while owed := [outbox for outbox in self._open if outbox.owed]:
            await owed[0].wait_until_sent()

    def _dispatch(self, socket: _Socket, data: bytes) -> None:
        """Answer the steps in the message `data` that need no waiting, and start the other calls of its frames."""
        steps, others = self._read(socket.caller, data)
        outbox = socket.outbox
        outbox.owed += len(steps) + len(others)
        if steps:
            answers, waiting = self._operations.answers_now(steps, socket.caller, socket.sessions)
            for step in waiting:
                if not self._operations.start_step(step, socket.caller, outbox.put):
                    self._tasks.start_soon(self._answer, socket, step)
            outbox.put(*answers)
        for frame in others:
            if isinstance(frame, bytes):
                outbox.put(frame)
                continue
            # Calls about sandboxes are cancelled when the socket closes, unless they have an idempotency key.
            tasks = socket.tasks if METHODS[frame.method].scope == SANDBOX else self._tasks
            tasks.start_soon(self._answer, socket, frame)

    def _read(self, caller: Caller, data: bytes) -> tuple[Sequence[StepFrame], Sequence[Frame | bytes]]:
        """Decode a message. Return its steps, and its other frames or, for invalid ones, the encoded answers."""
        if len(data) <= self._max_frame_bytes and caller.may(PLAY):
            # Try to decode all frames as steps, which is fastest. This fails if any frame is invalid or not a step.
            with suppress(*UNREADABLE):
                found = _STEPS.decode(data)
                if not isinstance(found, list):
                    return [found], ()
                if len(found) <= MAX_FRAMES:
                    return found, ()
        frames: list[Frame | RequestError]
        try:
            frames = read_each(data, _FRAMES, _FRAME) if data.lstrip()[:1] == b"[" else [read(data, _FRAME)]
        except RequestError as error:
            frames = [error]
        if len(frames) > MAX_FRAMES:
            frames = [RequestError(f"too many frames in a message: {len(frames)} (limit {MAX_FRAMES}); send fewer")]
        checked = [self._check(caller, frame) for frame in frames]
        steps = [one for one in checked if isinstance(one, StepFrame)]
        return steps, [one for one in checked if not isinstance(one, StepFrame)]

    def _check(self, caller: Caller, frame: Frame | RequestError) -> StepFrame | Frame | bytes:
        """Return the frame if it is valid and the caller may make its call; otherwise the encoded error to send."""
        if isinstance(frame, RequestError):
            return self._operations.failure(frame).answer(None)
        try:
            if len(memoryview(frame.params)) > self._max_frame_bytes:
                raise TooLargeError(f"the frame's parameters are too large (limit {self._max_frame_bytes} bytes)")
            operation = METHODS.get(frame.method)
            if operation is None:
                raise RequestError(f"unknown method {frame.method[:100]!r}{did_you_mean(frame.method, METHODS)}")
            if operation.scope is not None:
                caller.require(operation.scope)
            return StepFrame(frame.id, read(frame.params, STEP.request_decoder)) if operation is STEP else frame
        except EnvkitError as error:
            return self._operations.failure(error).answer(frame.id)

    async def _answer(self, socket: _Socket, frame: Frame | StepFrame) -> None:
        if isinstance(frame, StepFrame):
            outcome = await self._dispatcher.outcome(STEP, frame.params, socket.caller)
        else:
            outcome = await self._call(socket, frame)
        socket.outbox.put(outcome.answer(frame.id))

    async def _call(self, socket: _Socket, frame: Frame) -> CallOutcome:
        """Run the call of a frame. Record the session or sandbox that it uses in `socket`, so that none expires."""
        operation, caller = METHODS[frame.method], socket.caller
        try:
            body: Any = read(frame.params, operation.request_decoder)
        except RequestError as error:
            return self._operations.failure(error)
        if operation is CREATE:
            socket.sessions.add(caller.key(body.session_id))
        elif operation is STOP:
            socket.sandboxes.discard(body.sandbox_id)
        elif operation is not VIEW and hasattr(body, "sandbox_id"):
            socket.sandboxes.add(body.sandbox_id)
        return await self._dispatcher.outcome(operation, body, caller)


async def _renew(operations: SandboxLifecycle, socket: _Socket) -> None:
    while True:
        await anyio.sleep(_RENEW_S)
        if socket.sandboxes:
            operations.keep(socket.sandboxes, socket.caller)
