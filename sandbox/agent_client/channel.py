"""The host's end of the agent protocol, which carries concurrent calls over one stream.

A frame consists of two big-endian 32-bit lengths, a header (a JSON object) and a body (bytes). The host does not trust
the agent. It checks lengths, types, call numbers and the total size of each reply. The first violation ends the channel
and the sandbox. So does a late reply, because an unresponsive agent cannot cancel the call. One task reads all frames
and wakes the callers.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import anyio
import orjson

from envkit import clock
from envkit.types import JSON, Cause, CauseKind

from .call import (
    MAX_BODY_BYTES,
    Call,
    ChannelEndedError,
    Fields,
    MalformedReplyError,
    RefusedCallError,
    Reply,
)
from .socket_stream import SocketStream

__all__ = [
    "AgentChannel",
    "Call",
    "ChannelEndedError",
    "RefusedCallError",
    "Reply",
    "SocketStream",
    "Stream",
    "Survived",
]

MAX_HEADER_BYTES = 1 << 20

_VERSION = 3
_FAREWELLS = frozenset({"exited", "killed", "out_of_memory", "expired", "orphaned", "protocol_error", "stopped"})
"""The kinds of cause that an agent may report before it ends the sandbox."""
_HEAD = struct.Struct(">II")


class Stream(Protocol):
    """A byte stream to and from an agent."""

    async def send(self, data: bytes) -> None:
        """Send all of `data`; wait while the other side does not read. The data of concurrent calls is not mixed.

        Raises:
            ConnectionError: The other side is gone.
        """
        ...

    async def receive(self) -> bytes:
        """Wait for data and return it; return empty bytes at the end. Must not be called concurrently."""
        ...

    def close(self) -> None:
        """Close the stream and wake a waiting `receive`; a repeated call does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Survived:
    """The OOM kills that a sandbox has survived, because they did not kill its process 1.

    Attributes:
        oom_kills: Number of OOM kills since the start of the sandbox.
        at_s: Time at which the agent last reported this number, in seconds since 1970; 0 without a report.
    """

    oom_kills: int = 0
    at_s: float = 0.0


class AgentChannel:
    """A channel for calls to one agent over `stream`, which it closes. Must be created in a running event loop.

    Attributes:
        loop: The event loop that the channel runs in.
        reason: Why the host ended the channel; None while it is open, after `close`, and after the agent ended it.
        farewell: The agent's last message: why it ended the sandbox. None if the agent has not sent this message.
        survived: The OOM kills that the sandbox has survived, as the agent last reported them.
        on_survived: Called after each report of an OOM kill; None for no callback.
    """

    def __init__(self, stream: Stream) -> None:
        self.loop = asyncio.get_running_loop()
        self.reason: Cause | None = None
        self.farewell: CauseKind | None = None
        self.survived = Survived()
        self.on_survived: Callable[[], None] | None = None
        self._stream = stream
        self._buffer = bytearray()
        self._needed = _HEAD.size
        self._calls: dict[int, Call] = {}
        self._last_id = 0
        self._hello: asyncio.Future[None] = self.loop.create_future()
        self._stalled: set[Call] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.is_ended = False
        self._end = anyio.Event()
        self._on_end: list[Callable[[], None]] = []
        self._reader: asyncio.Task[None] | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether reading is paused because a caller does not read the reply to its call."""
        return bool(self._stalled)

    async def open(self, config: Fields, timeout_s: float) -> None:
        """Wait for the hello, the first frame that an agent sends, and send the configuration `config`.

        Raises:
            ChannelEndedError: The agent is gone, or sent no valid hello within `timeout_s` seconds.
        """
        # Do not use a task group for this task, because the task must outlive this method.
        self._reader = self.loop.create_task(self._read())
        with anyio.move_on_after(timeout_s):
            await asyncio.wait([self._hello])
        if not self._hello.done():
            self.fail(Cause(CauseKind.START_FAILED, f"not ready after {timeout_s:g} s"))
        if self.is_ended:
            raise ChannelEndedError(self.reason)
        await self.send({"config": dict(config)})

    async def call(
        self, do: str, /, *, feed: bytes | AsyncIterator[bytes] | None = None, queue_s: float = 0.0, **fields: JSON
    ) -> Reply:
        """Make a call to the agent and return the reply. The call may wait `queue_s` seconds in the agent's queue.

        A reply later than ``timeout_s`` plus 10 s, or larger than ``keep_bytes`` or ``max_bytes``, ends the channel.
        Cancelling this method cancels the call in the sandbox, and waits at most 2 s for the call's program to end.

        Raises:
            RefusedCallError: The agent refused the call.
            ChannelEndedError: The agent is gone or unresponsive.
            ValueError: The arguments exceed 1 MiB.
        """
        call = await self.start(do, fields, queue_s, streamed=False)
        try:
            if feed is not None:
                await call.feed(feed)
            return await call.reply()
        except BaseException:
            await call.leave()
            raise

    async def start(self, do: str, fields: Fields, queue_s: float = 0.0, *, streamed: bool = True) -> Call:
        """Start a call; the caller ends it with `Call.leave`. Raises what `call` raises.

        If the reply is `streamed`, reading from the agent pauses while more than 1 MiB of it are unread.
        """
        frame = _frame({"id": self._last_id + 1, "do": do, **fields})
        if self.is_ended:
            raise ChannelEndedError(self.reason)
        self._last_id += 1
        call = self._calls[self._last_id] = Call(self, self._last_id, do, fields, queue_s, streamed=streamed)
        try:
            await self._send_frame(frame)
        except BaseException:
            await call.leave()
            raise
        return call

    async def send(self, header: Fields, body: bytes = b"") -> None:
        """Send one frame."""
        await self._send_frame(_frame(header, body))

    async def ended(self) -> None:
        """Wait until the channel has ended."""
        await self._end.wait()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Run the function `call` when the channel ends, or immediately if it has already ended."""
        if self.is_ended:
            call()
        else:
            self._on_end.append(call)

    def close(self) -> None:
        """End the channel; all calls in progress raise `ChannelEndedError`. A repeated call does nothing."""
        self.fail(None)

    def fail(self, reason: Cause | None) -> None:
        """End the channel, unless it has ended. `reason` is None if the host closes it or the agent has ended it."""
        if self.is_ended:
            return
        self.is_ended = True
        self.reason = reason
        self._stream.close()
        if self._reader is not None and self._reader is not asyncio.current_task(self.loop):
            self._reader.cancel()
        self._hello.cancel()
        for call in list(self._calls.values()):
            call.finish(error=ChannelEndedError(reason))
        self._end.set()
        for callback in self._on_end:
            callback()

    def broken(self, what: str) -> ChannelEndedError:
        """End the channel because of the protocol error `what`; return the exception that the caller must raise."""
        self.fail(_protocol_error(what))
        return ChannelEndedError(self.reason)

    def forget(self, call: Call) -> None:
        """Remove a call that is over. Any later frame with the number of this call is a protocol error."""
        self._calls.pop(call.id, None)
        self.unstall(call)

    def stall(self, call: Call) -> None:
        """Pause reading from the agent until `unstall` is called for `call`."""
        self._stalled.add(call)
        self._flows.clear()

    def unstall(self, call: Call) -> None:
        """Undo `stall` for `call`; resume reading unless another call is stalled."""
        self._stalled.discard(call)
        if not self._stalled:
            self._flows.set()

    async def _send_frame(self, frame: bytes) -> None:
        if self.is_ended:
            raise ChannelEndedError(self.reason)
        try:
            await self._stream.send(frame)
        except ConnectionError:
            self.fail(None)
            raise ChannelEndedError(self.reason) from None

    async def _read(self) -> None:
        reason: Cause | None = Cause(CauseKind.UNKNOWN, "the channel failed")
        try:
            while data := await self._stream.receive():
                self._take(data)
                while self._stalled:
                    await self._flows.wait()
            reason = None
        except MalformedReplyError as error:
            reason = _protocol_error(str(error))
        except ConnectionError:
            reason = None
        finally:
            self.fail(reason)

    def _take(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= self._needed:
            head_bytes, body_bytes = _HEAD.unpack_from(buffer)
            if head_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
                raise MalformedReplyError(f"frame too large: header {head_bytes} bytes, body {body_bytes} bytes")
            body_at = _HEAD.size + head_bytes
            length = body_at + body_bytes
            if len(buffer) < length:
                self._needed = length
                return
            with memoryview(buffer) as view:
                head, body = bytes(view[_HEAD.size : body_at]), bytes(view[body_at:length])
            del buffer[:length]
            self._needed = _HEAD.size
            self._handle_frame(head, body)

    def _handle_frame(self, head: bytes, body: bytes) -> None:
        try:
            header = orjson.loads(head)
        except ValueError:
            raise MalformedReplyError("a header that is not JSON") from None
        if type(header) is not dict:
            raise MalformedReplyError("a header that is not an object")
        if not self._hello.done():
            _check_hello(header)
            self._hello.set_result(None)
            return
        if "id" not in header and ("ending" in header or "oom_kills" in header):
            self._handle_notice(header, body)
            return
        number = header.get("id")
        call = self._calls.get(number) if type(number) is int else None
        if call is None:
            raise MalformedReplyError("a reply to an unknown call")
        call.take(header, body)

    def _handle_notice(self, header: Mapping[str, JSON], body: bytes) -> None:
        """Handle a frame about the sandbox, not about a call: the sandbox ends, or it has survived an OOM kill."""
        ending, kills = header.get("ending"), header.get("oom_kills")
        if isinstance(ending, str) and ending in _FAREWELLS and not body:
            self.farewell = CauseKind(ending)
        elif type(kills) is int and kills >= 0 and not body:
            self.survived = Survived(kills, clock.wall())
            if self.on_survived is not None:
                self.on_survived()
        else:
            raise MalformedReplyError("an unknown notice about the sandbox")


def _protocol_error(what: str) -> Cause:
    return Cause(CauseKind.PROTOCOL_ERROR, f"broken frame: {what}")


def _check_hello(header: Mapping[str, JSON]) -> None:
    version = header.get("hello")
    if type(version) is not int:
        raise MalformedReplyError(f"a first frame that is not hello {_VERSION}")
    if version != _VERSION:
        raise MalformedReplyError(
            f"hello {version} instead of hello {_VERSION}: another version of envkit started this sandbox; "
            "use that version, or start a new sandbox"
        )


def _frame(header: Fields, body: bytes = b"") -> bytes:
    """Encode a frame.

    Raises:
        ValueError: The header is too large.
    """
    try:
        head = orjson.dumps(header)
    except TypeError:
        # File names that are not UTF-8 contain lone surrogates, which `orjson` rejects. Escape them.
        head = json.dumps(header, ensure_ascii=False).encode(errors="backslashreplace")
    if len(head) > MAX_HEADER_BYTES:
        raise ValueError(f"arguments have more than {MAX_HEADER_BYTES} bytes; send large data as a file")
    return _HEAD.pack(len(head), len(body)) + head + body
