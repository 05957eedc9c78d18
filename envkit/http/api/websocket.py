"""The server's WebSocket endpoint: receives calls as frames and sends answers, for many sessions on one socket.

A call continues after its socket closes, so that the caller can reconnect and repeat the call. Only commands in
sandboxes without an idempotency key are cancelled. While a socket is open, the sessions and sandboxes that were used
over it do not expire. Answers that are ready in the same iteration of the event loop are sent in one message.

The memory that each socket uses is limited; see `envkit.http.limits.memory_budget.Backpressure`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import anyio
import msgspec
from anyio.abc import TaskGroup

from envkit.errors import EnvkitError, RequestError, TooLargeError
from envkit.http.api.operations import Operations
from envkit.http.auth.caller import PLAY, SANDBOX, Caller
from envkit.http.limits.websocket_queues import Inbox, Outbox
from envkit.http.protocol.asgi import Receive, Send
from envkit.http.protocol.messages import MAX_FRAMES, UNREADABLE, Frame, SessionStepBody, StepFrame, read, read_each
from envkit.http.sandboxes.operations import PREFIX, SandboxOperations
from envkit.http.sessions.counters import StepMetrics

_FREE = frozenset({"health", "ready"})
"""Methods that need no scope."""

_FRAME_BYTES = 4096
"""Memory of a frame that is answered by a task, in addition to its parameters."""

_SMALL_STEP_BYTES = 1024
"""Pending steps up to this size are not counted, because counting would slow down ordinary steps."""

_BATCH_STEPS = 100
"""Steps answered before the memory of answers is checked again."""

_RENEW_S = 1.0
"""Seconds between renewals of sandbox leases."""

_STEPS = msgspec.json.Decoder(list[StepFrame] | StepFrame)
_STEP_BODY = msgspec.json.Decoder(SessionStepBody)
_FRAME = msgspec.json.Decoder(Frame)
_FRAMES = msgspec.json.Decoder(list[Frame])


class Sockets:
    """All open WebSockets of a server.

    Args:
        operations: The operations that the frames call.
        tasks: Task group in which calls run, so that they continue after their socket closes.
        max_frame_bytes: Maximum size of a frame's parameters, in bytes.
    """

    def __init__(self, operations: Operations, tasks: TaskGroup, max_frame_bytes: int) -> None:
        self._operations = operations
        self._tasks = tasks
        self._max_frame_bytes = max_frame_bytes
        self._open: set[Outbox] = set()

    async def serve(
        self,
        caller: Caller,
        receive: Receive,
        send: Send,
        metrics: StepMetrics | None = None,
    ) -> None:
        """Serve one socket until it closes. Stop reading from it while its caller sends too much.

        Args:
            caller: The caller that opened the socket.
            receive: The `receive` function of ASGI.
            send: The `send` function of ASGI.
            budget: Limits the memory that the socket uses; None for no limit.
            flow: Flow control of the connection; None if the server offers none.
            metrics: Counts the sessions and steps of this socket.
        """
        operations = self._operations.by(caller)
        inbox, outbox = Inbox(receive), Outbox()
        used: set[str] = set()
        metrics = metrics or StepMetrics()
        sandboxes: set[str] = set()
        await receive()
        await send({"type": "websocket.accept"})
        self._open.add(outbox)
        try:
            with self._operations.sessions.keep_alive(used):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(outbox.run, send)
                    if self._operations.sandboxes is not None:
                        tasks.start_soon(_renew, self._operations.sandboxes, sandboxes, caller)

                    async def answer_sandbox(frame: Frame, size: int) -> None:
                        try:
                            if outbox.is_full:
                                await outbox.wait_for_reader()
                            outbox.put(await operations.answer_sandbox(frame, sandboxes))
                        finally:
                            outbox.forget(size)

                    def begin_sandbox(frame: Frame, size: int) -> None:
                        tasks.start_soon(answer_sandbox, frame, size)

                    while (message := await inbox.take())["type"] == "websocket.receive":
                        data = message.get("bytes") or (message.get("text") or "").encode()
                        count = await self._dispatch(operations, caller, data, outbox, used, metrics, begin_sandbox)
                        if outbox.is_behind:
                            await inbox.pause_until(outbox.wait_for_room)
                        if wait_s := caller.charge(max(1, count)):
                            await inbox.pause_until(partial(anyio.sleep, wait_s))
                    tasks.cancel_scope.cancel()
        finally:
            self._open.discard(outbox)

    async def answered(self) -> None:
        """Wait until all frames of open sockets are answered."""
        while owed := [outbox for outbox in self._open if outbox.owed]:
            await owed[0].wait_until_answered()

    async def _dispatch(
        self,
        operations: Operations,
        caller: Caller,
        data: bytes,
        outbox: Outbox,
        used: set[str],
        metrics: StepMetrics,
        begin_sandbox: Callable[[Frame, int], None],
    ) -> int:
        """Start the call of each frame in a message, and return the number of frames."""
        steps, others = self._read(operations, caller, data)
        count = len(steps) + len(others)
        outbox.owed += count
        metrics.steps += len(steps)
        pending_bytes = len(data) // count if steps and len(data) > _SMALL_STEP_BYTES * count else 0
        for first in range(0, len(steps), _BATCH_STEPS):
            if first:
                await outbox.wait_for_reader()
            batch = steps[first : first + _BATCH_STEPS] if len(steps) > _BATCH_STEPS else steps
            self._step(operations, batch, outbox, used, metrics, pending_bytes)
        for frame in others:
            if isinstance(frame, bytes):
                outbox.put(frame)
                continue
            size = _FRAME_BYTES + len(memoryview(frame.params))
            outbox.remember(size)
            if frame.method.startswith(PREFIX):
                begin_sandbox(frame, size)
            else:
                self._tasks.start_soon(self._answer, operations, frame, outbox, used, metrics, size)
        return count

    def _step(
        self,
        operations: Operations,
        steps: Sequence[StepFrame],
        outbox: Outbox,
        used: set[str],
        metrics: StepMetrics,
        pending_bytes: int,
    ) -> None:
        """Answer the steps that can be answered immediately, and start the others.

        Each started step counts as `pending_bytes` of memory until it is answered.
        """
        answers, waiting = operations.answers_now(steps, used)
        for step in waiting:
            send = outbox.put
            if pending_bytes:
                outbox.remember(pending_bytes)
                send = partial(outbox.put_and_forget, pending_bytes)
            if not operations.start_step(step, send):
                self._tasks.start_soon(self._answer, operations, step, outbox, used, metrics, pending_bytes)
        outbox.put(*answers)

    def _read(
        self, operations: Operations, caller: Caller, data: bytes
    ) -> tuple[Sequence[StepFrame], Sequence[Frame | bytes]]:
        """Split a message into steps and other frames. In place of an invalid frame, return the answer that rejects
        it.
        """
        if len(data) <= self._max_frame_bytes and caller.may(PLAY):
            # Decode all frames as steps, which is fastest. This fails if a frame is another call or is invalid.
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
            checked = self._check(operations, caller, frame)
            if isinstance(checked, StepFrame):
                steps.append(checked)
            else:
                others.append(checked)
        return steps, others

    def _check(self, operations: Operations, caller: Caller, frame: Frame | RequestError) -> StepFrame | Frame | bytes:
        """Return the frame if it is valid and the caller may make its call; otherwise the answer that rejects it."""
        if isinstance(frame, RequestError):
            return operations.refusal(None, frame)
        try:
            if len(memoryview(frame.params)) > self._max_frame_bytes:
                raise TooLargeError(f"the parameters of the frame are too large (limit {self._max_frame_bytes} bytes)")
            if frame.method not in _FREE:
                caller.require(SANDBOX if frame.method.startswith(PREFIX) else PLAY)
            return StepFrame(frame.id, read(frame.params, _STEP_BODY)) if frame.method == "step" else frame
        except EnvkitError as error:
            return operations.refusal(frame.id, error)

    async def _answer(
        self,
        operations: Operations,
        frame: Frame | StepFrame,
        outbox: Outbox,
        used: set[str],
        metrics: StepMetrics,
        size: int,
    ) -> None:
        try:
            if outbox.is_full and isinstance(frame, Frame):
                await outbox.wait_for_reader()
            outbox.put(await operations.answer(frame, used, metrics))
        finally:
            outbox.forget(size)


async def _renew(operations: SandboxOperations, used: set[str], caller: Caller) -> None:
    while True:
        await anyio.sleep(_RENEW_S)
        if used:
            operations.keep(used, caller)
