"""The server's side of a WebSocket: frames in, answers out, many sessions on one socket.

A call goes on when its socket breaks, so that the caller can come back over another one and ask again; only what is run
in a sandbox without a key is ended. While a socket is open, the sessions and sandboxes that were used over it do not
expire. All answers that are ready in one turn of the event loop travel in one message.

What a socket holds is counted (`envkit.http.bodies.Backlog`): while sockets hold too much, those that hold more than a
little are not read on.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup

from envkit.errors import EnvkitError, RequestError, TooLargeError
from envkit.http.asgi import Message, Receive, Send
from envkit.http.bodies import UNCOUNTED_BYTES, Backlog, Bodies
from envkit.http.callers import PLAY, SANDBOX, Caller
from envkit.http.calls import Calls, read_each
from envkit.http.sandbox_calls import PREFIX, SandboxCalls
from envkit.http.wire import MAX_FRAMES, Frame, SessionStepBody, StepFrame, batches, read

MAX_OWED = 10_000
"""Answers that one socket may be owed; beyond it, nothing more is read from that socket."""

MAX_UNREAD_BYTES = 64 << 20
"""Size of those that are there and that its caller has not taken, likewise."""

_FREE = frozenset({"health", "ready"})
"""The methods that need no scope."""

_FRAME_BYTES = 4096
"""What a frame takes that a task answers, beside its parameters."""

_SMALL_STEP_BYTES = 1024
"""Size up to which a step that waits is not counted, since that would cost the usual ones more than it is worth."""

_AT_ONCE = 100
"""Steps that are answered before it is looked whether there is room for more answers."""

_LOOK_S = 1.0
"""Seconds between looks whether sockets still hold too much."""

_KEEP_S = 1.0
"""Seconds between renewals of the leases of sandboxes."""

_AHEAD_BYTES = 1 << 20
"""How much is read ahead from a socket that has to wait, so that its end is heard."""

_MESSAGE_BYTES = 256
"""What a message takes beside its content."""

_BATCH_BYTES = 1 << 19
"""Half of what clients in the wild take in one message unless told otherwise."""

_STEPS = msgspec.json.Decoder(list[StepFrame] | StepFrame)
_STEP_BODY = msgspec.json.Decoder(SessionStepBody)
_FRAME = msgspec.json.Decoder(Frame)
_FRAMES = msgspec.json.Decoder(list[Frame])


class Link(Protocol):
    """The connection beneath a socket."""

    def taken(self) -> None:
        """Hear that a large message was taken."""
        ...

    async def drained(self) -> None:
        """Wait until the client has read nearly all of what was sent."""
        ...


class Sockets:
    """All sockets of a server.

    Args:
        calls: What they act on.
        tasks: Where calls run, since they outlive their socket.
        max_frame_bytes: Size of a frame's parameters above which it is refused.
    """

    def __init__(self, calls: Calls, tasks: TaskGroup, max_frame_bytes: int) -> None:
        self._calls = calls
        self._tasks = tasks
        self._max_frame_bytes = max_frame_bytes
        self._open: set[_Outbox] = set()

    async def serve(
        self,
        caller: Caller,
        receive: Receive,
        send: Send,
        bodies: Bodies | None = None,
        link: Link | None = None,
    ) -> None:
        """Serve one socket until it closes; one whose caller sends too much is not read for a while.

        Args:
            caller: Whose it is.
            receive: Gives its messages.
            send: Takes answers.
            bodies: Where what it holds is counted; None for no bound.
            link: What is beneath, where that can be told and asked how much there is.
        """
        bodies = bodies or Bodies()
        calls = self._calls.by(caller)
        inbox, outbox = _Inbox(receive), _Outbox(bodies.backlog(caller), link)
        used: set[str] = set()
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
                        count = await self._take(calls, caller, data, outbox, used, begin_sandbox)
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
        calls: Calls,
        caller: Caller,
        data: bytes,
        outbox: _Outbox,
        used: set[str],
        begin_sandbox: Callable[[Frame, int], None],
    ) -> int:
        """Begin what the frames of a message ask for; return how many there are."""
        steps, others = self._read(calls, caller, data)
        count = len(steps) + len(others)
        outbox.owed += count
        each = (
            len(data) // count if steps and len(data) > _SMALL_STEP_BYTES * count else 0
        )  # what a step that waits takes
        for first in range(0, len(steps), _AT_ONCE):
            if first:
                await outbox.wait_for_reader()
            self._step(calls, steps[first : first + _AT_ONCE] if len(steps) > _AT_ONCE else steps, outbox, used, each)
        for frame in others:
            if isinstance(frame, bytes):
                outbox.put(frame)
                continue
            size = _FRAME_BYTES + len(memoryview(frame.params))
            outbox.remember(size)
            if frame.method.startswith(PREFIX):
                begin_sandbox(frame, size)
            else:
                self._tasks.start_soon(self._answer, calls, frame, outbox, used, size)
        return count

    def _step(self, calls: Calls, steps: Sequence[StepFrame], outbox: _Outbox, used: set[str], each: int) -> None:
        """Answer steps, or begin to where that takes its time."""
        answers, waiting = calls.answers_now(steps, used)
        for step in waiting:
            give = outbox.put
            if each:
                outbox.remember(each)
                give = partial(outbox.put_and_forget, each)
            if not calls.ask(step, give):
                self._tasks.start_soon(self._answer, calls, step, outbox, used, each)
        outbox.put(*answers)

    def _read(self, calls: Calls, caller: Caller, data: bytes) -> tuple[Sequence[StepFrame], Sequence[Frame | bytes]]:
        """Return the steps of a message, and the other frames: in place of each that is not taken the answer to it."""
        if len(data) <= self._max_frame_bytes and caller.may(PLAY):
            with suppress(RequestError):  # there are other calls among the steps, or mistakes
                found = read(data, _STEPS)
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

    def _taken(self, calls: Calls, caller: Caller, frame: Frame | RequestError) -> StepFrame | Frame | bytes:
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

    async def _answer(self, calls: Calls, frame: Frame | StepFrame, outbox: _Outbox, used: set[str], size: int) -> None:
        try:
            if outbox.is_full and isinstance(frame, Frame):
                await outbox.wait_for_reader()
            outbox.put(await calls.answer(frame, used))
        finally:
            outbox.forget(size)


async def _keep(calls: SandboxCalls, used: set[str], caller: Caller) -> None:
    while True:
        await anyio.sleep(_KEEP_S)
        if used:
            calls.keep(used, caller)


class _Inbox:
    """Messages of one socket."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: deque[Message] = deque()
        self._room = _AHEAD_BYTES

    async def take(self) -> Message:
        """Return the next message."""
        if not self._ahead:
            return await self._receive()
        message = self._ahead.popleft()
        self._room += _size(message)
        return message

    async def rest(self, seconds: float) -> None:
        """Take nothing for a while; it ends early when the socket does, and what came before that is dropped."""
        with anyio.move_on_after(seconds):
            while self._room > 0:
                message = await self._receive()
                if message["type"] != "websocket.receive":
                    self._ahead.clear()
                    self._ahead.append(message)
                    return
                self._ahead.append(message)
                self._room -= _size(message)
            await anyio.sleep_forever()

    async def rest_until(self, is_time: Callable[[], Awaitable[None]]) -> None:
        """Take nothing until it is time; ends early as `rest`."""
        async with anyio.create_task_group() as tasks:

            async def wake() -> None:
                await is_time()
                tasks.cancel_scope.cancel()

            tasks.start_soon(wake)
            await self.rest(math.inf)
            tasks.cancel_scope.cancel()


def _size(message: Message) -> int:
    return _MESSAGE_BYTES + len(message.get("bytes") or message.get("text") or b"")


class _Outbox:
    """Answers of one socket that wait for being sent, and how much there is of them and of what they answer."""

    def __init__(self, backlog: Backlog, link: Link | None) -> None:
        self.owed = 0
        """Frames that came and whose answers were not sent."""
        self._backlog = backlog
        self._link = link
        self._unread_bytes = 0
        self._asked_bytes = 0
        self._is_over = False
        self._answers: list[bytes] = []
        # asyncio's, as the server's loop is: anyio's cannot be cleared, and a new one for each message costs more.
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()

    def put(self, *answers: bytes) -> None:
        if self._is_over or not answers:  # nobody is there to take them
            return
        if not self._answers:
            self._filled.set()
        self._answers += answers
        self._unread_bytes += sum(map(len, answers))
        if self._unread_bytes > UNCOUNTED_BYTES:
            self._count()

    def put_and_forget(self, size: int, answer: bytes) -> None:
        """Put in the answer to what was remembered."""
        self.put(answer)
        self.forget(size)

    def remember(self, size: int) -> None:
        """Count what a frame takes that is not answered at once."""
        self._asked_bytes += size
        if self._asked_bytes > UNCOUNTED_BYTES:
            self._count()

    def forget(self, size: int) -> None:
        """Count that no more."""
        if size:
            self._asked_bytes -= size
            if self._backlog.count:
                self._count()
                self._emptied.set()

    def _count(self) -> None:
        self._backlog.hold(self._asked_bytes + self._unread_bytes)

    @property
    def is_behind(self) -> bool:
        """Whether more answers are owed, or there are more bytes, than may be."""
        return self.owed > MAX_OWED or self._unread_bytes > MAX_UNREAD_BYTES or self._backlog.is_too_much

    async def wait_for_room(self) -> None:
        """Wait until it is not behind."""
        while self.is_behind:
            await self._wait()

    async def wait_until_answered(self) -> None:
        """Wait until no answer is owed."""
        while self.owed:
            await self._wait()

    async def wait_for_reader(self) -> None:
        """Wait until there are no more bytes than may be that nobody has read."""
        while self.is_full:
            await self._wait()

    @property
    def is_full(self) -> bool:
        """Whether there are more bytes than may be that nobody has read."""
        return self._unread_bytes > UNCOUNTED_BYTES and (
            self._unread_bytes > MAX_UNREAD_BYTES or self._backlog.is_too_much
        )

    async def _wait(self) -> None:
        self._emptied.clear()
        with anyio.move_on_after(_LOOK_S):  # others may make room too
            await self._emptied.wait()

    async def run(self, send: Send) -> None:
        """Send what is put in, until cancelled or the socket is closed."""
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                answers, self._answers = self._answers, []
                size = self._unread_bytes
                for batch in batches(answers, _BATCH_BYTES):
                    await send({"type": "websocket.send", "bytes": batch})
                if size > UNCOUNTED_BYTES and self._link is not None:
                    await self._link.drained()
                self._sent(len(answers), size)
        except OSError:  # closed meanwhile, which `receive` reports too
            pass
        finally:
            self._is_over = True
            self._answers = []
            self._sent(self.owed, self._unread_bytes)

    def _sent(self, count: int, size: int) -> None:
        self.owed -= count
        self._unread_bytes -= size
        if self._backlog.count:
            self._count()
        self._emptied.set()
