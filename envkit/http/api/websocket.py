"""The server's WebSocket endpoint: receives calls as frames and sends answers, for many sessions on one socket.

A call continues after its socket closes, so that the caller can reconnect and repeat the call. The exception is a call
about a sandbox: it is cancelled if it has no idempotency key. While a socket is open, the sessions and sandboxes that
were used over it do not expire. Answers that are ready in the same iteration of the event loop are sent in one message.

`envkit.http.limits.websocket_queues` limits unanswered frames and unread answers, in number and size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from envkit.errors import EnvkitError, RequestError, TooLargeError, did_you_mean
from envkit.http.api.calls import Calls
from envkit.http.auth.caller import PLAY, SANDBOX, Caller
from envkit.http.limits.websocket_queues import Inbox, Outbox
from envkit.http.protocol.asgi import CallOutcome, Receive, Send
from envkit.http.protocol.messages import MAX_FRAMES, UNREADABLE, Frame, StepFrame, read, read_each
from envkit.http.protocol.operations import CREATE, METHODS, STEP, STOP, VIEW
from envkit.http.sandboxes.operations import SandboxOperations
from envkit.http.sessions.counters import StepMetrics
from envkit.types import TenantKey

_FRAME_BYTES = 4096
"""Bytes of memory that a frame uses while a task answers it, in addition to its parameters."""

_SMALL_STEP_BYTES = 1024
"""Size of a step in bytes up to which its memory is not counted: counting would slow down ordinary steps."""

_BATCH_STEPS = 100
"""Number of steps to answer between two checks whether unread answers use too much memory."""

_RENEW_S = 1.0
"""Seconds between renewals of sandbox leases."""

_STEPS = msgspec.json.Decoder(list[StepFrame] | StepFrame)
_FRAME = msgspec.json.Decoder(Frame)
_FRAMES = msgspec.json.Decoder(list[Frame])


@dataclass(slots=True, eq=False)
class _Socket:
    """One open WebSocket: its caller, the sessions and sandboxes that were used over it, and its unsent answers."""

    caller: Caller
    tasks: TaskGroup
    """Runs the calls that are cancelled when the socket closes."""
    outbox: Outbox
    metrics: StepMetrics
    sessions: set[TenantKey] = field(default_factory=set)
    sandboxes: set[str] = field(default_factory=set)


class Sockets:
    """All open WebSockets of a server.

    Args:
        calls: Runs the calls that the frames contain.
        tasks: Task group for the calls that continue after their socket closes.
        max_frame_bytes: Maximum size of a frame's parameters, in bytes.
        sandboxes: Renews the leases of sandboxes that are used over the sockets; None if the server lends no sandboxes.
    """

    def __init__(
        self, calls: Calls, tasks: TaskGroup, max_frame_bytes: int, sandboxes: SandboxOperations | None = None
    ) -> None:
        self._calls = calls
        self._operations = calls.operations
        self._tasks = tasks
        self._max_frame_bytes = max_frame_bytes
        self._sandboxes = sandboxes
        self._open: set[Outbox] = set()

    async def serve(self, caller: Caller, receive: Receive, send: Send, metrics: StepMetrics | None = None) -> None:
        """Serve one socket until it closes. Pause reading from the socket while its caller exceeds a limit.

        Args:
            caller: The caller that opened the socket.
            receive: The `receive` function of ASGI.
            send: The `send` function of ASGI.
            metrics: Counts the sessions and steps of this socket.
        """
        inbox, outbox = Inbox(receive), Outbox()
        await receive()
        await send({"type": "websocket.accept"})
        self._open.add(outbox)
        try:
            async with anyio.create_task_group() as tasks:
                socket = _Socket(caller, tasks, outbox, metrics or StepMetrics())
                with self._operations.sessions.keep_alive(socket.sessions):
                    tasks.start_soon(outbox.run, send)
                    if self._sandboxes is not None:
                        tasks.start_soon(_renew, self._sandboxes, socket)
                    while (message := await inbox.take())["type"] == "websocket.receive":
                        data = message.get("bytes") or (message.get("text") or "").encode()
                        count = await self._dispatch(socket, data)
                        if outbox.is_behind:
                            await inbox.pause_until(outbox.wait_for_room)
                        if wait_s := caller.charge(max(1, count)):
                            await inbox.pause_until(partial(anyio.sleep, wait_s))
                    tasks.cancel_scope.cancel()
        finally:
            self._open.discard(outbox)

    async def answered(self) -> None:
        """Wait until all frames that were received over open sockets are answered."""
        while owed := [outbox for outbox in self._open if outbox.owed]:
            await owed[0].wait_until_answered()

    async def _dispatch(self, socket: _Socket, data: bytes) -> int:
        """Start the calls of the frames in the message `data`, and return the number of frames."""
        steps, others = self._read(socket.caller, data)
        outbox = socket.outbox
        count = len(steps) + len(others)
        outbox.owed += count
        socket.metrics.steps += len(steps)
        pending_bytes = len(data) // count if steps and len(data) > _SMALL_STEP_BYTES * count else 0
        for first in range(0, len(steps), _BATCH_STEPS):
            if first:
                await outbox.wait_for_reader()
            batch = steps[first : first + _BATCH_STEPS] if len(steps) > _BATCH_STEPS else steps
            self._step(socket, batch, pending_bytes)
        for frame in others:
            if isinstance(frame, bytes):
                outbox.put(frame)
                continue
            size = _FRAME_BYTES + len(memoryview(frame.params))
            outbox.remember(size)
            # Calls about sandboxes are cancelled when the socket closes, unless they have an idempotency key.
            tasks = socket.tasks if METHODS[frame.method].scope == SANDBOX else self._tasks
            tasks.start_soon(self._answer, socket, frame, size)
        return count

    def _step(self, socket: _Socket, steps: Sequence[StepFrame], pending_bytes: int) -> None:
        """Answer the steps that can be answered immediately, and start the others.

        Each started step counts as `pending_bytes` of memory until it is answered.
        """
        outbox = socket.outbox
        answers, waiting = self._operations.answers_now(steps, socket.caller, socket.sessions)
        for step in waiting:
            send = outbox.put
            if pending_bytes:
                outbox.remember(pending_bytes)
                send = partial(outbox.put_and_forget, pending_bytes)
            if not self._operations.start_step(step, socket.caller, send):
                self._tasks.start_soon(self._answer, socket, step, pending_bytes)
        outbox.put(*answers)

    def _read(self, caller: Caller, data: bytes) -> tuple[Sequence[StepFrame], Sequence[Frame | bytes]]:
        """Decode a message. Return its steps, and its other frames. For an invalid frame, the second list contains the
        encoded answer that rejects the frame.
        """
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
        steps: list[StepFrame] = []
        others: list[Frame | bytes] = []
        for frame in frames:
            checked = self._check(caller, frame)
            if isinstance(checked, StepFrame):
                steps.append(checked)
            else:
                others.append(checked)
        return steps, others

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

    async def _answer(self, socket: _Socket, frame: Frame | StepFrame, size: int) -> None:
        outbox = socket.outbox
        try:
            if isinstance(frame, StepFrame):
                outcome = await self._calls.outcome(STEP, frame.params, socket.caller)
            else:
                if outbox.is_full:
                    await outbox.wait_for_reader()
                outcome = await self._call(socket, frame)
            outbox.put(outcome.answer(frame.id))
        finally:
            outbox.forget(size)

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
        outcome = await self._calls.outcome(operation, body, caller)
        if operation is CREATE and not outcome.is_error:
            socket.metrics.envs[body.env_id] += 1
        return outcome


async def _renew(operations: SandboxOperations, socket: _Socket) -> None:
    while True:
        await anyio.sleep(_RENEW_S)
        if socket.sandboxes:
            operations.keep(socket.sandboxes, socket.caller)
