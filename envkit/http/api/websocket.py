"""The server's side of a WebSocket: frames in, answers out, many sessions on one socket.

A call goes on when its socket breaks, so that the caller can come back over another one and ask again; only what is run
in a sandbox without a key is ended. While a socket is open, the sessions and sandboxes that were used over it do not
expire. All answers that are ready in one turn of the event loop travel in one message.

What a socket holds is counted (`envkit.http.limits.memory_budget.Backlog`): while sockets hold too much, those that
hold more than a little are not read on.
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
from envkit.http.limits.memory_budget import UNCOUNTED_BYTES, MemoryBudget
from envkit.http.limits.websocket_queues import Inbox, Outbox, WebSocketFlow
from envkit.http.protocol.asgi import Receive, Send
from envkit.http.protocol.messages import MAX_FRAMES, UNREADABLE, Frame, SessionStepBody, StepFrame, read, read_each
from envkit.http.sandboxes.operations import PREFIX, SandboxOperations
from envkit.http.sessions.counters import StepMetrics

_FREE = frozenset({"health", "ready"})
"""The methods that need no scope."""

_FRAME_BYTES = 4096
"""What a frame takes that a task answers, beside its parameters."""

_SMALL_STEP_BYTES = 1024
"""Size up to which a step that waits is not counted, since that would cost the usual ones more than it is worth."""

_AT_ONCE = 100
"""Steps that are answered before it is looked whether there is room for more answers."""

_KEEP_S = 1.0
"""Seconds between renewals of the leases of sandboxes."""

_STEPS = msgspec.json.Decoder(list[StepFrame] | StepFrame)
_STEP_BODY = msgspec.json.Decoder(SessionStepBody)
_FRAME = msgspec.json.Decoder(Frame)
_FRAMES = msgspec.json.Decoder(list[Frame])


class Sockets:
    """All sockets of a server.

    Args:
        calls: What they act on.
        tasks: Where calls run, since they outlive their socket.
        max_frame_bytes: Size of a frame's parameters above which it is refused.
    """

    def __init__(self, calls: Operations, tasks: TaskGroup, max_frame_bytes: int) -> None:
        self._calls = calls
        self._tasks = tasks
        self._max_frame_bytes = max_frame_bytes
        self._open: set[Outbox] = set()

    async def serve(
        self,
        caller: Caller,
        receive: Receive,
        send: Send,
        bodies: MemoryBudget | None = None,
        link: WebSocketFlow | None = None,
        played: StepMetrics | None = None,
    ) -> None:
        """Serve one socket until it closes; one whose caller sends too much is not read for a while.

        Args:
            caller: Whose it is.
            receive: Gives its messages.
            send: Takes answers.
            bodies: Where what it holds is counted; None for no bound.
            link: What is beneath, where that can be told and asked how much there is.
            played: Where it is noted what is played over it.
        """
        bodies = bodies or MemoryBudget()
        calls = self._calls.by(caller)
        inbox, outbox = Inbox(receive), Outbox(bodies.backlog(caller), link)
        used: set[str] = set()
        played = played or StepMetrics()
        sandboxes: set[str] = set()
        await receive()
        await send({"type": "websocket.accept"})
        self._open.add(outbox)
        try:
            with self._calls.sessions.keeping(used):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(outbox.run, send)
                    if self._calls.sandboxes is not None:
                        tasks.start_soon(_keep, self._calls.sandboxes, sandboxes, caller)

                    async def answer_sandbox(frame: Frame, size: int) -> None:
                        room = bodies.room(caller)
                        try:
                            if outbox.is_full:
                                await outbox.wait_for_reader()
                            outbox.put(await calls.answer_sandbox(frame, sandboxes, room))
                        finally:
                            room.free()
                            outbox.forget(size)

                    def begin_sandbox(frame: Frame, size: int) -> None:
                        tasks.start_soon(answer_sandbox, frame, size)

                    while (message := await inbox.take())["type"] == "websocket.receive":
                        data = message.get("bytes") or (message.get("text") or "").encode()
                        if link is not None and len(data) > UNCOUNTED_BYTES:
                            link.taken()
                        count = await self._take(calls, caller, data, outbox, used, played, begin_sandbox)
                        if outbox.is_behind:
                            await inbox.rest_until(outbox.wait_for_room)
                        if wait_s := caller.charge(max(1, count)):
                            await inbox.rest(wait_s)
                    tasks.cancel_scope.cancel()
        finally:
            self._open.discard(outbox)

    async def answered(self) -> None:
        """Wait until no open socket is owed an answer."""
        while owed := [outbox for outbox in self._open if outbox.owed]:
            await owed[0].wait_until_answered()

    async def _take(
        self,
        calls: Operations,
        caller: Caller,
        data: bytes,
        outbox: Outbox,
        used: set[str],
        played: StepMetrics,
        begin_sandbox: Callable[[Frame, int], None],
    ) -> int:
        """Begin what the frames of a message ask for; return how many there are."""
        steps, others = self._read(calls, caller, data)
        count = len(steps) + len(others)
        outbox.owed += count
        played.steps += len(steps)
        # What a step that waits takes.
        each = len(data) // count if steps and len(data) > _SMALL_STEP_BYTES * count else 0
        for first in range(0, len(steps), _AT_ONCE):
            if first:
                await outbox.wait_for_reader()
            some = steps[first : first + _AT_ONCE] if len(steps) > _AT_ONCE else steps
            self._step(calls, some, outbox, used, played, each)
        for frame in others:
            if isinstance(frame, bytes):
                outbox.put(frame)
                continue
            size = _FRAME_BYTES + len(memoryview(frame.params))
            outbox.remember(size)
            if frame.method.startswith(PREFIX):
                begin_sandbox(frame, size)
            else:
                self._tasks.start_soon(self._answer, calls, frame, outbox, used, played, size)
        return count

    def _step(
        self,
        calls: Operations,
        steps: Sequence[StepFrame],
        outbox: Outbox,
        used: set[str],
        played: StepMetrics,
        each: int,
    ) -> None:
        """Answer steps, or begin to where that takes its time."""
        answers, waiting = calls.answers_now(steps, used)
        for step in waiting:
            give = outbox.put
            if each:
                outbox.remember(each)
                give = partial(outbox.put_and_forget, each)
            if not calls.start_step(step, give):
                self._tasks.start_soon(self._answer, calls, step, outbox, used, played, each)
        outbox.put(*answers)

    def _read(
        self, calls: Operations, caller: Caller, data: bytes
    ) -> tuple[Sequence[StepFrame], Sequence[Frame | bytes]]:
        """Return the steps of a message, and the other frames: in place of each that is not taken the answer to it."""
        if len(data) <= self._max_frame_bytes and caller.may(PLAY):
            with suppress(*UNREADABLE):  # there are other calls among the steps, or mistakes
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
            frames = [RequestError(f"a message may have {MAX_FRAMES} frames, got {len(frames)}")]
        steps: list[StepFrame] = []
        others: list[Frame | bytes] = []
        for frame in frames:
            taken = self._taken(calls, caller, frame)
            if isinstance(taken, StepFrame):
                steps.append(taken)
            else:
                others.append(taken)
        return steps, others

    def _taken(self, calls: Operations, caller: Caller, frame: Frame | RequestError) -> StepFrame | Frame | bytes:
        """Return a frame if it is taken, or else the answer to it; any token opens a socket."""
        if isinstance(frame, RequestError):
            return calls.refusal(None, frame)
        try:
            if len(memoryview(frame.params)) > self._max_frame_bytes:
                raise TooLargeError(f"the parameters of a frame may have {self._max_frame_bytes} bytes")
            if frame.method not in _FREE:
                caller.require(SANDBOX if frame.method.startswith(PREFIX) else PLAY)
            return StepFrame(frame.id, read(frame.params, _STEP_BODY)) if frame.method == "step" else frame
        except EnvkitError as error:
            return calls.refusal(frame.id, error)

    async def _answer(
        self,
        calls: Operations,
        frame: Frame | StepFrame,
        outbox: Outbox,
        used: set[str],
        played: StepMetrics,
        size: int,
    ) -> None:
        try:
            if outbox.is_full and isinstance(frame, Frame):
                await outbox.wait_for_reader()
            outbox.put(await calls.answer(frame, used, played))
        finally:
            outbox.forget(size)


async def _keep(calls: SandboxOperations, used: set[str], caller: Caller) -> None:
    while True:
        await anyio.sleep(_KEEP_S)
        if used:
            calls.keep(used, caller)
