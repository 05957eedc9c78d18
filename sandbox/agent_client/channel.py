"""The host's end of the talk with the agent of a box: many calls at once over one stream.

A frame is two big-endian 32-bit lengths, a header (JSON, an object) and a body (bytes). What comes from the box is not
believed: lengths, types, call numbers and the total of what a call may answer are checked; the first frame that breaks
a rule ends the channel, and with it the box. One task reads; an answer wakes the caller that waits for it. A call
that is not answered in time ends the channel too, since an agent that does not answer cannot be told to stop anything.
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
    one_line,
)
from .socket_stream import SocketStream

__all__ = [
    "AgentChannel",
    "Call",
    "ChannelEndedError",
    "Hello",
    "RefusedCallError",
    "Reply",
    "SocketStream",
    "Stream",
    "Survived",
]

MAX_HEADER_BYTES = 1 << 20

_VERSION = 3
_FAREWELLS = frozenset({"exited", "killed", "out_of_memory", "expired", "orphaned", "protocol_error", "stopped"})
"""Kinds of `Cause` that an agent may give for its end."""
_HEAD = struct.Struct(">II")


class Stream(Protocol):
    """Bytes to and from an agent."""

    async def send(self, data: bytes) -> None:
        """Send all of `data`, waiting while the other side takes nothing. Calls may overlap: each one's bytes stay
        together, in the order of the calls.

        Raises:
            ConnectionError: The other side is gone.
        """
        ...

    async def receive(self) -> bytes:
        """Return what has come, waiting for some; empty at the end. For one caller at a time."""
        ...

    def close(self) -> None:
        """Let go, and let the waiting `receive` return; safe to repeat."""
        ...


@dataclass(frozen=True, slots=True)
class Hello:
    """What an agent says first.

    Attributes:
        pid: Its process id, as seen inside.
        python: Version of its Python, such as ``"3.11"``; may be another program's name.
        uid: Its user id, as seen inside.
    """

    pid: int
    python: str
    uid: int


@dataclass(frozen=True, slots=True)
class Survived:
    """OOM kills in a sandbox after which its process 1 was still there.

    Attributes:
        oom_kills: Their number since the sandbox was started.
        at_s: When the last of them was reported, in seconds since 1970; 0 for never.
    """

    oom_kills: int = 0
    at_s: float = 0.0


class AgentChannel:
    """Calls to one agent. Made in a running event loop.

    Args:
        stream: Closed with the channel.

    Attributes:
        loop: The loop that it lives in.
        reason: Why we ended it; None when the other side did, or it was closed, or while it is open.
        farewell: Why the agent says that it ends the sandbox; None while it does not.
        survived: The OOM kills in the sandbox that its agent has reported.
        on_survived: Called at each such report; None for nothing.
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
        self._hello: asyncio.Future[Hello] = self.loop.create_future()
        self._stalled: set[Call] = set()
        self._room: asyncio.Future[None] | None = None
        self._is_ended = False
        self._end = anyio.Event()
        self._on_end: list[Callable[[], None]] = []
        self._reader: asyncio.Task[None] | None = None

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    @property
    def is_stalled(self) -> bool:
        """Whether nothing is read because somebody does not take what has come."""
        return bool(self._stalled)

    async def open(self, config: Fields, timeout_s: float) -> Hello:
        """Wait for the agent's first word and tell it what to be.

        Raises:
            ChannelEndedError: It is gone, says something else, or said nothing for `timeout_s` seconds.
        """
        # Owned by the channel, not by a task group: a box outlives the call that starts it.
        self._reader = self.loop.create_task(self._read())
        with anyio.move_on_after(timeout_s):
            await asyncio.wait([self._hello])
        if not self._hello.done():
            self.fail(Cause(CauseKind.START_FAILED, f"not ready after {timeout_s:g} s"))
        if self._is_ended:
            raise ChannelEndedError(self.reason)
        await self.send({"config": dict(config)})
        return self._hello.result()

    async def call(
        self, do: str, /, *, feed: bytes | AsyncIterator[bytes] | None = None, queue_s: float = 0.0, **fields: JSON
    ) -> Reply:
        """Make a call and return its answer.

        ``timeout_s``, ``keep_bytes`` and ``max_bytes`` among the fields also say how long and how large the answer may
        be. Cancelling it cancels the call inside, and waits until what that had started is ended, for at most 2 s.

        Args:
            do: What to do.
            feed: Its input.
            queue_s: Seconds that it may wait for its turn inside.
            fields: Its arguments.

        Raises:
            RefusedCallError: The agent refused.
            ChannelEndedError: The agent is gone, or does not answer.
            ValueError: The arguments have more than 1 MiB.
        """
        call = await self._begin(do, fields, queue_s, streamed=False)
        try:
            if feed is not None:
                await call.feed(feed)
            return await call.reply()
        except BaseException:
            await call.leave()
            raise

    async def start(self, do: str, /, **fields: JSON) -> Call:
        """Make a call whose answer is taken piece by piece; end it by `Call.leave`. Raises as `call`."""
        return await self._begin(do, fields, 0.0, streamed=True)

    async def send(self, header: Fields, body: bytes = b"") -> None:
        """Send one frame."""
        await self._post(_frame(header, body))

    async def ended(self) -> None:
        """Return once it has ended."""
        await self._end.wait()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have `call` called once it has ended."""
        if self._is_ended:
            call()
        else:
            self._on_end.append(call)

    def close(self) -> None:
        """End it; every call under way raises `ChannelEndedError`. Safe to repeat."""
        self.fail(None)

    def fail(self, reason: Cause | None) -> None:
        """End it, unless it has ended, and say why."""
        if self._is_ended:
            return
        self._is_ended = True
        self.reason = reason
        self._stream.close()
        if self._reader is not None and self._reader is not asyncio.current_task(self.loop):
            self._reader.cancel()
        self._hello.cancel()
        for call in list(self._calls.values()):
            call.lose(ChannelEndedError(reason))
        self._end.set()
        for told in self._on_end:
            told()

    def broken(self, what: str) -> ChannelEndedError:
        """End it because of what the agent said; returns what to raise."""
        self.fail(_broken(what))
        return ChannelEndedError(self.reason)

    def forget(self, call: Call) -> None:
        """Expect no more frames of `call`."""
        self._calls.pop(call.id, None)
        self.unstall(call)

    def stall(self, call: Call) -> None:
        """Read no more until `call` is unstalled."""
        self._stalled.add(call)

    def unstall(self, call: Call) -> None:
        """Read on as far as it is up to `call`."""
        if call in self._stalled:
            self._stalled.remove(call)
            if not self._stalled and self._room is not None and not self._room.done():
                self._room.set_result(None)

    async def _begin(self, do: str, fields: Fields, queue_s: float, *, streamed: bool) -> Call:
        frame = _frame({"id": self._last_id + 1, "do": do, **fields})
        if self._is_ended:
            raise ChannelEndedError(self.reason)
        self._last_id += 1
        call = self._calls[self._last_id] = Call(self, self._last_id, do, fields, queue_s, streamed=streamed)
        try:
            await self._post(frame)
        except BaseException:
            await call.leave()
            raise
        return call

    async def _post(self, frame: bytes) -> None:
        if self._is_ended:
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
                    self._room = self.loop.create_future()
                    await self._room
            reason = None
        except MalformedReplyError as error:
            reason = _broken(str(error))
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
                raise MalformedReplyError(f"lengths of {head_bytes} and {body_bytes}")
            body_at = _HEAD.size + head_bytes
            length = body_at + body_bytes
            if len(buffer) < length:
                self._needed = length
                return
            with memoryview(buffer) as view:
                head, body = bytes(view[_HEAD.size : body_at]), bytes(view[body_at:length])
            del buffer[:length]
            self._needed = _HEAD.size
            self._take_frame(head, body)

    def _take_frame(self, head: bytes, body: bytes) -> None:
        try:
            header = orjson.loads(head)
        except ValueError:
            raise MalformedReplyError("a header that is not JSON") from None
        if type(header) is not dict:
            raise MalformedReplyError("a header that is no object")
        if not self._hello.done():
            self._hello.set_result(_hello(header))
            return
        if "id" not in header and ("ending" in header or "oom_kills" in header):
            self._take_news(header, body)
            return
        number = header.get("id")
        call = self._calls.get(number) if type(number) is int else None
        if call is None:
            raise MalformedReplyError("an answer to a call that nobody made")
        call.take(header, body)

    def _take_news(self, header: Mapping[str, JSON], body: bytes) -> None:
        """Take in what the agent says of the whole sandbox: that it ends, or that it survived an OOM kill."""
        ending, kills = header.get("ending"), header.get("oom_kills")
        if isinstance(ending, str) and ending in _FAREWELLS and not body:
            self.farewell = CauseKind(ending)
        elif type(kills) is int and kills >= 0 and not body:
            self.survived = Survived(kills, clock.wall())
            if self.on_survived is not None:
                self.on_survived()
        else:
            raise MalformedReplyError("an unknown notice about the sandbox")


def _broken(what: str) -> Cause:
    return Cause(CauseKind.PROTOCOL_ERROR, f"broken frame: {what}")


def _hello(header: Mapping[str, JSON]) -> Hello:
    version, pid, python, uid = (header.get(name) for name in ("hello", "pid", "python", "uid"))
    if type(version) is not int:
        raise MalformedReplyError(f"a first word that is not hello {_VERSION}")
    if version != _VERSION:
        raise MalformedReplyError(
            f"hello {version} instead of hello {_VERSION}: another version of envkit started this sandbox; "
            "use that version, or start a new sandbox"
        )
    if type(pid) is not int or type(uid) is not int or not isinstance(python, str):
        raise MalformedReplyError("a hello without pid, python and uid")
    return Hello(pid, one_line(python), uid)


def _frame(header: Fields, body: bytes = b"") -> bytes:
    """Return a frame as it is sent.

    Raises:
        ValueError: The header is too large.
    """
    try:
        head = orjson.dumps(header)
    except TypeError:  # file names that are not UTF-8 hold lone surrogates, which only the slower one escapes
        head = json.dumps(header).encode()
    if len(head) > MAX_HEADER_BYTES:
        raise ValueError(f"arguments of more than {MAX_HEADER_BYTES} bytes cannot be sent into a box")
    return _HEAD.pack(len(head), len(body)) + head + body
