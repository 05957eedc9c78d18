"""The host's end of the stream to the program inside a box: many calls at once, answers in any order.

What comes out of a box is in hostile hands. Every frame is bounded and every field typed before it is looked at, the
answers to a call are bounded by what was asked for, and the first frame that breaks a rule ends the channel.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from collections.abc import AsyncIterable
from typing import Any, Protocol

import anyio
import msgspec

from envkit.types import JSON

MAX_HEADER_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 16

_LENGTHS = struct.Struct(">II")
_FULL_BYTES = 1 << 20
"""How much a call or a stream keeps for somebody who does not take it yet."""
_STRAY_BYTES = 64 << 20
"""How much may come for calls that were given up, which their box may not know yet."""
_FRAME_PRICE_BYTES = 64
_FAREWELL_S = 1.0


class ChannelEndedError(Exception):
    """The channel is over; whoever owns the box knows why."""


class SilenceError(Exception):
    """No answer came in time."""


class RefusedCallError(Exception):
    """The program inside says that it cannot do that.

    Attributes:
        code: One of ``missing``, ``refused``, ``unsupported``, ``unreachable``, ``bad``, ``too_large``.
        text: One line for people.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Stream(Protocol):
    """Bytes to and from the program inside."""

    async def send(self, data: bytes) -> None:
        """Write `data`, in one piece among those of other callers; return once the next may be written.

        Raises:
            ConnectionError: The stream is over.
        """
        ...

    async def receive(self) -> bytes:
        """Return what came, waiting for some; empty at the end. Called by one task."""
        ...

    def close(self) -> None:
        """End the stream at once; safe to repeat."""
        ...


class Frame(msgspec.Struct, frozen=True, gc=False):
    """The header of a frame from inside; which fields count depends on the call."""

    id: int = 0
    of: str = ""
    end: bool = False
    error: str | None = None
    text: str = ""
    hello: int = 0
    python: str = ""
    uid: int = 0
    code: int | None = None
    timed_out: bool = False
    cut: int = 0
    duration_s: float = 0.0
    oom: bool | None = None
    state: str = ""
    size: int = 0
    mode: int = 0
    ack: int = 0
    processes: int | None = None
    memory_bytes: int | None = None
    uptime_s: float | None = None


class Reply(msgspec.Struct, gc=False):
    """A whole answer: its last header, and what came before it."""

    end: Frame
    out: bytes
    err: bytes
    data: bytes


class Call:
    """One call that is under way; made by `Channel.start`."""

    def __init__(self, channel: Channel, number: int, max_bytes: int | None) -> None:
        self._channel = channel
        self._number = number
        self._room = max_bytes
        self._parts = {"out": bytearray(), "err": bytearray(), "data": bytearray()}
        self._frames: deque[tuple[Frame, bytes]] | None = None if max_bytes is not None else deque()
        self._kept = 0
        self._news: asyncio.Future[None] = channel.loop.create_future()
        self._room_again: asyncio.Future[None] | None = None
        self._last: Frame | None = None
        self._failure: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self._last is not None or self._failure is not None

    async def send(self, data: bytes) -> None:
        """Send input, in frames."""
        for at in range(0, len(data), MAX_BODY_BYTES):
            await self._channel.post({"id": self._number, "more": True}, data[at : at + MAX_BODY_BYTES])

    async def send_eof(self) -> None:
        """End the input."""
        await self._channel.post({"id": self._number, "eof": True})

    async def acknowledge(self, count: int) -> None:
        """Let the other side send `count` bytes more."""
        await self._channel.post({"id": self._number, "ack": count})

    async def resize(self, rows: int, columns: int) -> None:
        """Give the terminal of this call another size."""
        await self._channel.call("resize", of=self._number, rows=rows, cols=columns)

    async def receive(self) -> tuple[Frame, bytes] | None:
        """Return the next frame of a call without `max_bytes`; None when the call is over.

        Raises:
            RefusedCallError: The program inside cannot do it.
            ChannelEndedError: The channel is over.
        """
        frames = self._frames
        assert frames is not None
        while not frames:
            if self._failure is not None:
                raise self._failure
            if self._last is not None:
                return None
            await self._news
            if not self.is_over:
                self._news = self._channel.loop.create_future()
        frame, body = frames.popleft()
        self._kept -= len(body) + _FRAME_PRICE_BYTES
        if self._room_again is not None and self._kept < _FULL_BYTES and not self._room_again.done():
            self._room_again.set_result(None)
        return frame, body

    async def reply(self) -> Reply:
        """Return the whole answer to a call with `max_bytes`."""
        if not self.is_over:
            await self._news
        if self._failure is not None:
            raise self._failure
        assert self._last is not None
        out, err, data = (bytes(part) for part in self._parts.values())
        return Reply(self._last, out, err, data)

    async def cancel(self) -> None:
        """Have what it started ended, and forget it; safe to repeat."""
        if not self.is_over:
            self.fail(asyncio.CancelledError())  # type: ignore[arg-type]
            await self._channel.give_up(self._number)

    def fail(self, failure: Exception) -> None:
        if not self.is_over:
            self._failure = failure
            self._wake()

    def take(self, frame: Frame, body: bytes) -> asyncio.Future[None] | None:
        """Take a frame in; return what to wait for before the next one comes.

        Raises:
            ValueError: The answer is longer than what was asked for.
        """
        if frame.error is not None:
            self._failure = RefusedCallError(frame.error, frame.text[:1000])
        elif frame.end:
            self._last = frame
        elif self._frames is not None:
            self._frames.append((frame, body))
            self._kept += len(body) + _FRAME_PRICE_BYTES
        else:
            assert self._room is not None
            self._room -= len(body) + _FRAME_PRICE_BYTES
            if self._room < 0 or frame.of not in self._parts:
                raise ValueError("an answer that was not asked for")
            self._parts[frame.of] += body
            return None
        self._wake()
        if self._kept < _FULL_BYTES or self.is_over:
            return None
        self._room_again = self._channel.loop.create_future()
        return self._room_again

    def _wake(self) -> None:
        if not self._news.done():
            self._news.set_result(None)
        if self._room_again is not None and self.is_over and not self._room_again.done():
            self._room_again.set_result(None)


class Channel:
    """Calls to the program inside a box. `run` must run for as long as it is used.

    Args:
        stream: The bytes.

    Attributes:
        loop: The event loop that it belongs to.
        breach: What rule the other side broke, in one line; empty if none.
    """

    def __init__(self, stream: Stream) -> None:
        self.loop = asyncio.get_running_loop()
        self.breach = ""
        self._stream = stream
        self._waiting = bytearray()
        self._calls: dict[int, Call] = {}
        self._last_number = 0
        self._stray = 0
        self._hello: asyncio.Future[Frame] = self.loop.create_future()
        self._decoder = msgspec.json.Decoder(Frame)
        self._ended = anyio.Event()

    async def run(self) -> None:
        """Take in what comes, until the end."""
        try:
            while data := await self._stream.receive():
                if (full := self._feed(data)) is not None:
                    await full
                while self._waiting and (full := self._feed(b"")) is not None:
                    await full
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            self.breach = f"broken frame: {str(error)[:200]}"
        except ConnectionError:
            pass
        finally:
            self.close()

    async def open(self, config: dict[str, JSON], *, timeout_s: float) -> Frame:
        """Wait for the greeting, and tell the program inside what it is to be.

        Raises:
            ChannelEndedError: It ended before it said anything.
            SilenceError: It said nothing in time.
        """
        with anyio.move_on_after(timeout_s):
            hello = await asyncio.shield(self._hello)
            await self.post({"config": config})
            return hello
        raise SilenceError

    async def call(
        self,
        do: str,
        /,
        *,
        feed: bytes | AsyncIterable[bytes] | None = None,
        max_bytes: int = 1 << 16,
        deadline_s: float = 30.0,
        **fields: Any,
    ) -> Reply:
        """Make a call and return its answer. Cancelling it ends what it started.

        Args:
            do: What to do.
            feed: Its input, which ends with this; None for a call without.
            max_bytes: Most bytes of the answer; more is a breach.
            deadline_s: Seconds until no answer means that nobody is there.
            fields: The rest of its first frame.

        Raises:
            RefusedCallError: The program inside cannot do it.
            ChannelEndedError: The channel is over.
            SilenceError: `deadline_s` passed.
        """
        call = await self.start(do, max_bytes=max_bytes, **fields)
        timer = self.loop.call_later(deadline_s, call.fail, SilenceError())
        try:
            if isinstance(feed, bytes):
                await call.send(feed)
                await call.send_eof()
            elif feed is not None:
                async for piece in feed:
                    if call.is_over:
                        break
                    await call.send(piece)
                else:
                    await call.send_eof()
            return await call.reply()
        except (asyncio.CancelledError, SilenceError):
            with anyio.move_on_after(_FAREWELL_S, shield=True):
                await self.give_up(call._number)  # noqa: SLF001 - the other half of the same thing
            raise
        finally:
            timer.cancel()
            self._calls.pop(call._number, None)  # noqa: SLF001

    async def start(self, do: str, /, *, max_bytes: int | None = None, **fields: Any) -> Call:
        """Begin a call; without `max_bytes` its frames are taken one by one.

        Raises:
            ChannelEndedError: The channel is over.
        """
        self._last_number += 1
        call = Call(self, self._last_number, None if max_bytes is None else max_bytes + (max_bytes >> 3) + (1 << 16))
        self._calls[self._last_number] = call
        try:
            await self.post({"id": self._last_number, "do": do, **fields})
        except BaseException:
            self._calls.pop(call._number, None)  # noqa: SLF001
            raise
        return call

    async def give_up(self, number: int) -> None:
        """Forget a call, and have it ended if the channel still is."""
        if self._calls.pop(number, None) is not None and not self._ended.is_set():
            with anyio.move_on_after(_FAREWELL_S, shield=True):
                try:
                    await self.post({"id": number, "cancel": True})
                except ChannelEndedError:
                    return

    async def post(self, header: dict[str, JSON], body: bytes = b"") -> None:
        """Send one frame.

        Raises:
            ChannelEndedError: The channel is over.
            ValueError: The header is too large.
        """
        try:
            text = msgspec.json.encode(header)
        except UnicodeEncodeError:  # names of files may hold bytes that are no text
            text = json.dumps(header).encode()
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(f"arguments and environment may have {MAX_HEADER_BYTES >> 10} KiB together")
        if self._ended.is_set():
            raise ChannelEndedError
        try:
            await self._stream.send(b"".join((_LENGTHS.pack(len(text), len(body)), text, body)))
        except ConnectionError:
            raise ChannelEndedError from None

    async def ended(self) -> None:
        """Return when it is over."""
        await self._ended.wait()

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()

    def close(self) -> None:
        """End it and every call that is under way; safe to repeat."""
        if not self._ended.is_set():
            self._ended.set()
            self._stream.close()
            if not self._hello.done():
                self._hello.set_exception(ChannelEndedError())
                self._hello.exception()  # nobody may be waiting for it
            for call in self._calls.values():
                call.fail(ChannelEndedError())
            self._calls.clear()

    def _feed(self, piece: bytes) -> asyncio.Future[None] | None:
        """Take whole frames in; return what to wait for if somebody has to take some first."""
        waiting = self._waiting
        waiting += piece
        at = 0
        full: asyncio.Future[None] | None = None
        while full is None and len(waiting) - at >= _LENGTHS.size:
            header_bytes, body_bytes = _LENGTHS.unpack_from(waiting, at)
            if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
                raise ValueError(f"{header_bytes} and {body_bytes} bytes")
            middle = at + _LENGTHS.size + header_bytes
            if len(waiting) < middle + body_bytes:
                break
            frame = self._decoder.decode(bytes(waiting[at + _LENGTHS.size : middle]))
            full = self._take(frame, bytes(waiting[middle : middle + body_bytes]))
            at = middle + body_bytes
        del waiting[:at]
        return full

    def _take(self, frame: Frame, body: bytes) -> asyncio.Future[None] | None:
        call = self._calls.get(frame.id)
        if call is not None and not call.is_over:
            full = call.take(frame, body)
            if call.is_over:
                self._calls.pop(frame.id, None)
            return full
        if frame.hello:
            if not self._hello.done():
                self._hello.set_result(frame)
            return None
        self._stray += len(body) + _FRAME_PRICE_BYTES
        if self._stray > _STRAY_BYTES:
            raise ValueError("too much for calls that nobody made")
        return None


class SocketStream(asyncio.Protocol):
    """A `Stream` over a connected socket; made by `over`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._input = bytearray()
        self._wanted: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._is_reading = True
        self._is_over = False

    @classmethod
    async def over(cls, connected: socket.socket) -> SocketStream:
        """Take over a connected stream socket."""
        connected.setblocking(False)
        loop = asyncio.get_running_loop()
        _, stream = await loop.connect_accepted_socket(cls, connected)
        return stream

    async def send(self, data: bytes) -> None:
        if self._transport is None or self._is_over:
            raise ConnectionError("the stream is over")
        self._transport.write(data)
        while self._drained is not None:
            await asyncio.shield(self._drained)

    async def receive(self) -> bytes:
        while not self._input:
            if self._is_over:
                return b""
            self._wanted = self._loop.create_future()
            try:
                await self._wanted
            finally:
                self._wanted = None
        taken = bytes(self._input)
        self._input.clear()
        if not self._is_reading and self._transport is not None and not self._is_over:
            self._is_reading = True
            self._transport.resume_reading()
        return taken

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._input += data
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)
        if len(self._input) > _FULL_BYTES and self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over = True
        for waiting in (self._wanted, self._drained):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        self._drained = None

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
