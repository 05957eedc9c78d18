"""One call to the agent of a sandbox: sends frames, validates the reply and enforces the deadline of the call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeGuard

import anyio

from envkit.types import JSON, Cause, CauseKind, ExecResult

MAX_BODY_BYTES = 64 << 10
WINDOW_BYTES = 256 << 10
"""Maximum number of unacknowledged bytes that either side of a forwarded connection may send."""
GRACE_S = 10.0
"""Maximum seconds from the timeout of a call to its reply or, if the call has no timeout, between two frames."""

_QUEUE_BYTES = 1 << 20
"""Reading from the channel pauses while the caller of any streamed call has left more than this many bytes unread."""
_SETTLE_S = 2.0
"""Maximum number of seconds that a cancelled call waits for its program to end."""
_RETRY_S = 0.5
"""Extra seconds after a deadline: a late event loop may run the timer before it reads a reply that came in time."""

Fields: TypeAlias = Mapping[str, JSON]


class ChannelEndedError(ConnectionError):
    """The channel to the agent has ended.

    Attributes:
        reason: Why the host ended the channel; None after `AgentChannel.close`, and after the agent ended the channel.
    """

    def __init__(self, reason: Cause | None) -> None:
        super().__init__(str(reason or "the stream ended"))
        self.reason = reason


class RefusedCallError(Exception):
    """The agent refused a call.

    Attributes:
        code: Kind of error: ``missing``, ``refused``, ``unsupported``, ``unreachable``, ``bad`` or ``too_large``.
        text: The reason, as one line.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class MalformedReplyError(Exception):
    """The agent sent a frame that violates the protocol; the message names the violation."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The complete reply to a call.

    Attributes:
        end: Header of the last frame.
        out: Standard output of the program that the call ran.
        err: Standard error of the program that the call ran.
        data: Content of the file or archive that the call read.
    """

    end: dict[str, JSON]
    out: bytes = b""
    err: bytes = b""
    data: bytes = b""


class CallChannel(Protocol):
    """Type with those members of `AgentChannel` that a `Call` uses."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def is_stalled(self) -> bool: ...
    async def send(self, header: Fields, body: bytes = b"") -> None: ...
    def fail(self, reason: Cause | None) -> None: ...
    def stall(self, call: Call) -> None: ...
    def unstall(self, call: Call) -> None: ...
    def forget(self, call: Call) -> None: ...


class AgentCalls(Protocol):
    """Type with those members of `AgentSandbox` that a shell or a running program uses."""

    @property
    def id(self) -> str: ...
    async def call(
        self, do: str, *, feed: bytes | AsyncIterator[bytes] | None = None, queue_s: float = 0.0, **fields: JSON
    ) -> Reply: ...
    async def result(self, reply: Reply) -> ExecResult: ...
    async def wait(self) -> Cause: ...


class Call:
    """A call in progress; `AgentChannel` creates it.

    Attributes:
        id: Number of the call, unique in its channel.
        end: Header of the last frame of the reply; None until it arrives.
    """

    def __init__(
        self, channel: CallChannel, number: int, do: str, fields: Fields, queue_s: float, *, streamed: bool
    ) -> None:
        loop = channel.loop
        timeout_s = fields.get("timeout_s")
        self.id = number
        self.end: dict[str, JSON] | None = None
        self.starts_program = _is_number(timeout_s)
        self._channel = channel
        self._is_streamed = streamed
        self._bounds = _bounds(do, fields)
        self._allowance_s = GRACE_S + queue_s + (timeout_s if _is_number(timeout_s) else 0.0)
        self._is_renewed = not self.starts_program
        self._is_abandoned = self._is_at_eof = self._is_retried = False
        self._error: Exception | None = None
        self._pieces: deque[tuple[str, bytes]] = deque()
        self._queued = 0
        self._unacknowledged = 0
        self._changed = asyncio.Event()
        self._deadline = loop.time() + self._allowance_s
        self._timer = loop.call_at(self._deadline, self._on_timer)

    @property
    def is_over(self) -> bool:
        """Whether the reply is complete or the call has failed."""
        return self.end is not None or self._error is not None

    async def send(self, header: Fields, body: bytes = b"") -> None:
        """Send a frame with the id of this call; `body` has at most `MAX_BODY_BYTES`."""
        if self._is_renewed:
            self._deadline = self._channel.loop.time() + self._allowance_s
        self._unacknowledged += len(body)
        await self._channel.send({"id": self.id, **header}, body)

    async def feed(self, content: bytes | AsyncIterator[bytes]) -> None:
        """Send `content` as the input of the call, then the end of input. Stop early if the call is over."""
        if isinstance(content, bytes):
            await self.feed_piece(content)
        else:
            async for piece in content:
                await self.feed_piece(piece)
                if self.is_over:
                    return
        if not self.is_over:
            await self.send({"eof": True})

    async def feed_piece(self, content: bytes) -> None:
        """Send `content` as input. Stop early if the call is over."""
        for start in range(0, len(content), MAX_BODY_BYTES):
            if self.is_over:
                return
            await self.send({"more": True}, content[start : start + MAX_BODY_BYTES])

    async def send_within_window(self, data: bytes) -> None:
        """Send `data` as input; pause while `WINDOW_BYTES` are unacknowledged. Stop early if the call is over."""
        for start in range(0, len(data), MAX_BODY_BYTES):
            piece = data[start : start + MAX_BODY_BYTES]
            while self._unacknowledged + len(piece) > WINDOW_BYTES and not self.is_over:
                await self._changed.wait()
            if self.is_over:
                return
            await self.send({"more": True}, piece)

    async def acknowledge(self, count: int) -> None:
        """Allow the agent to send `count` more bytes of a forwarded connection."""
        left = self._bounds["data"]
        assert left is not None
        self._bounds["data"] = left + count
        await self.send({"ack": count})

    async def receive(self) -> tuple[str, bytes] | None:
        """Wait for the next piece of the reply; return its kind (such as ``out``) and its content, or None at the end.

        Raises:
            RefusedCallError: The agent refused the call.
            ChannelEndedError: The channel has ended.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._is_at_eof or self.end is not None:
                return None
            await self._changed.wait()
        kind, body = self._pieces.popleft()
        self._queued -= len(body)
        if self._queued <= _QUEUE_BYTES // 2:
            self._channel.unstall(self)
        return kind, body

    async def reply(self) -> Reply:
        """Return the reply when it is complete. Raises the same errors as `receive`."""
        pieces: dict[str, list[bytes]] = {}
        while (piece := await self.receive()) is not None:
            pieces.setdefault(piece[0], []).append(piece[1])
        await self.over()
        assert self.end is not None
        return Reply(self.end, **{kind: b"".join(bodies) for kind, bodies in pieces.items()})

    async def over(self) -> None:
        """Wait for the last frame of the reply. Raises the same errors as `receive`."""
        while self.end is None:
            if self._error is not None:
                raise self._error
            await self._changed.wait()

    async def leave(self) -> None:
        """Cancel the call unless it is over, and wait at most 2 s for its program to end.

        Cancellation of the calling task does not interrupt this method, and an ended channel raises no error.
        """
        if self.is_over:
            return
        self._is_abandoned = True
        self._pieces.clear()
        self._channel.unstall(self)
        self._is_renewed = False
        self._deadline = self._channel.loop.time() + GRACE_S
        self._arm()
        with anyio.CancelScope(shield=True), anyio.move_on_after(_SETTLE_S), suppress(ChannelEndedError):
            await self.send({"cancel": True})
            while self.starts_program and not self.is_over:
                await self._changed.wait()

    def disarm(self) -> None:
        """Remove the deadline of the call."""
        self._timer.cancel()

    def take(self, header: dict[str, JSON], body: bytes) -> None:
        """Handle one frame of the reply; the channel calls this method when it has received the frame.

        Raises:
            MalformedReplyError: The frame violates the protocol.
        """
        if self._is_renewed:
            self._deadline = self._channel.loop.time() + self._allowance_s
        if "of" in header:
            self._take_piece(header["of"], body)
        elif body:
            raise MalformedReplyError("a body without 'of', the name of its output")
        elif header.get("end") is True:
            self.finish(end=header)
        elif "error" in header:
            code, text = header["error"], header.get("text")
            if not isinstance(code, str) or not isinstance(text, str):
                raise MalformedReplyError("an error without code and text")
            self.finish(error=RefusedCallError(code, one_line(text)))
        elif "ack" in header:
            self._take_ack(header["ack"])
        elif header.get("eof") is True and not self._is_at_eof:  # A second ``eof`` is a protocol error.
            self._is_at_eof = True
            self._wake()
        else:
            raise MalformedReplyError("an unexpected header")

    def _take_piece(self, kind: JSON, body: bytes) -> None:
        if not isinstance(kind, str) or kind not in self._bounds or self._is_at_eof:
            raise MalformedReplyError(f"an unexpected piece of {kind!r:.40}")
        if not body and kind != "open":
            raise MalformedReplyError("an empty piece")
        bound = self._bounds[kind]
        if bound is not None:
            if len(body) > bound:
                raise MalformedReplyError(f"{kind!r} exceeds the requested size")
            self._bounds[kind] = -1 if kind == "open" else bound - len(body)
        if self._is_abandoned:
            return
        self._pieces.append((kind, body))
        self._queued += len(body)
        if self._is_streamed and self._queued > _QUEUE_BYTES:
            self._channel.stall(self)
        self._wake()

    def _take_ack(self, count: JSON) -> None:
        if type(count) is not int or not 0 < count <= self._unacknowledged:
            raise MalformedReplyError("an acknowledgement of bytes that were not sent")
        self._unacknowledged -= count
        self._wake()

    def finish(self, *, end: dict[str, JSON] | None = None, error: Exception | None = None) -> None:
        """End the call, with the last frame of the reply or an error."""
        self.end, self._error = end, error
        self.disarm()
        self._channel.forget(self)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _arm(self) -> None:
        self.disarm()
        self._timer = self._channel.loop.call_at(self._deadline, self._on_timer)

    def _on_timer(self) -> None:
        loop = self._channel.loop
        if self._channel.is_stalled:  # Extend the deadline, because the host has paused reading.
            self._deadline = loop.time() + self._allowance_s
        elif loop.time() >= self._deadline:
            if self._is_retried:
                self._channel.fail(Cause(CauseKind.UNRESPONSIVE, "it does not answer"))
                return
            self._is_retried = True
            self._timer = loop.call_later(_RETRY_S, self._on_timer)
            return
        self._is_retried = False
        self._arm()


def one_line(text: str) -> str:
    """Convert text from a sandbox to one printable line of at most 300 characters."""
    return "".join(character if character.isprintable() else " " for character in text[:300]).strip()


def _bounds(do: str, fields: Fields) -> dict[str, int | None]:
    """Return the outputs that a reply to the call `do` may have, and the maximum bytes of each (None: no maximum)."""
    keep, most = fields.get("keep_bytes"), fields.get("max_bytes")
    if do == "forward":
        return {"open": 0, "data": WINDOW_BYTES}
    if fields.get("stream") is True:
        return {"out": None, "err": None}
    if type(keep) is int:
        return {"out": keep, "err": keep}
    return {"data": most} if type(most) is int else {}


def _is_number(value: JSON) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
