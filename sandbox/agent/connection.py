"""The agent's end of a channel to the host, and the calls that the host makes on the channel, several at a time.

When the channel is closed, its calls are cancelled.
"""

from __future__ import annotations

import os

from . import framing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .event_loop import Loop
    from .exec.outputs import OutputTail
    from .framing import Json

    Header = dict[str, Json]

_HIGH_WATER_BYTES = 256 << 10
"""Each sender of output that is able to pause must do so while this number of bytes or more is unsent."""
_READ_BYTES = 1 << 18


class CallError(Exception):
    """A call that the host made has failed. The agent sends the code and the text of this error to the host.

    Attributes:
        code: Kind of error: ``missing``, ``refused``, ``unsupported``, ``unreachable``, ``bad`` or ``too_large``.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class IncomingCall:
    """A call that the host has made and that is in progress.

    `HostConnection` calls `more`, `eof`, `ack` and `cancel` for the frames that the host sends after the first one.

    Attributes:
        is_over: Whether the call has ended. The last frames of its reply may still be queued.
    """

    def __init__(self, connection: HostConnection, number: int) -> None:
        self.connection = connection
        self.is_over = False
        self._number = number

    def more(self, piece: bytes) -> None:
        """Handle `piece`, the next bytes of the input that the host sends for this call."""

    def eof(self) -> None:
        """Handle the end of the input that the host sends for this call."""

    def ack(self, count: int) -> None:
        """Handle the host's acknowledgement that it has read `count` more bytes of the reply."""

    def cancel(self) -> None:
        """Cancel the call: end everything that it has started, and send the last frame of the reply."""
        self.finish()

    def send_header(self, **header: Json) -> None:
        self.connection.send({"id": self._number, **header})

    def send_piece(self, of: str, piece: bytes | memoryview) -> None:
        """Send `piece` (at most `framing.MAX_BODY_BYTES`) as the next bytes of the output `of`, such as ``data``."""
        self.connection.send({"id": self._number, "of": of}, piece)

    def pieces(self, of: str, content: bytes) -> Iterator[bytes]:
        """Yield encoded frames that contain `content`, in pieces, as the output `of`, such as ``data``."""
        view = memoryview(content)
        for at in range(0, len(content), framing.MAX_BODY_BYTES):
            yield framing.frame({"id": self._number, "of": of}, view[at : at + framing.MAX_BODY_BYTES])

    def end_frame(self, **result: Json) -> bytes:
        """Return the frame that reports success and ends the call."""
        return framing.frame({"id": self._number, "end": True, **result})

    def finish(self, **result: Json) -> None:
        self.send_header(end=True, **result)
        self._end()

    def finish_with(self, frames: Iterator[bytes]) -> None:
        """End the call: send `frames` as fast as the host reads them. The last of them must come from `end_frame`."""
        self.connection.feed(frames)
        self._end()

    def finish_with_outputs(self, tails: dict[str, OutputTail], **result: Json) -> None:
        """End the call: send what `tails` have stored of each output, then `result` and the number of dropped bytes."""
        kept = {of: tail.take() for of, tail in tails.items()}
        cut = sum([dropped for _, dropped in kept.values()])

        def frames() -> Iterator[bytes]:
            for of, (content, _) in kept.items():
                yield from self.pieces(of, content)
            yield self.end_frame(cut=cut, **result)

        self.finish_with(frames())

    def fail(self, code: str, text: str) -> None:
        self.send_header(error=code, text=text)
        self._end()

    def crashed(self, text: str) -> None:
        """Fail the call because the agent's own code raised an exception, which `text` describes."""
        if not self.is_over:
            self.fail("bad", text)

    def _end(self) -> None:
        self.is_over = True
        self.connection.forget(self._number)


class HostConnection:
    """One channel to the host.

    Args:
        reader: Descriptor to read frames from.
        writer: Descriptor to write frames to; may be the same as `reader`.
        start: Receives this connection, the id of a new call and the header of its first frame. Starts the call and
            returns it, or returns None if the call has already ended. May raise `CallError`.
        on_config: Receives the configuration of the sandbox, which the host sends.
        on_over: Called once, when the channel is closed, with the kind of cause and the reason as one line.
    """

    def __init__(
        self,
        loop: Loop,
        reader: int,
        writer: int,
        *,
        start: Callable[[HostConnection, int, Header], IncomingCall | None],
        on_config: Callable[[Header], None],
        on_over: Callable[[str, str], None],
    ) -> None:
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self._loop = loop
        self._files = (reader, writer)
        self._start = start
        self._on_config = on_config
        self._on_over = on_over
        self._decoder = framing.Decoder()
        self._calls: dict[int, IncomingCall] = {}
        self._out: list[bytes] = []
        self._queued = 0
        self._flushes = False
        self._feeds: list[Iterator[bytes]] = []
        self._room_callbacks: list[Callable[[], None]] = []
        self._holders: set[object] = set()
        self.is_open = True
        self._incoming = loop.watch(reader, on_read=self._read)
        self._outgoing = loop.watch(writer, on_write=self._flush)
        self._incoming.want(read=True)

    @property
    def is_full(self) -> bool:
        """Whether so much data is unsent that senders must pause; `when_room` notifies them when they may continue."""
        return self._queued >= _HIGH_WATER_BYTES

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, as soon as senders may continue or the channel is closed."""
        self._room_callbacks.append(callback)

    def send(self, header: Header, body: bytes | memoryview = b"") -> None:
        self.send_raw(framing.frame(header, body))

    def send_raw(self, frame: bytes) -> None:
        """Send an encoded frame."""
        if self.is_open:
            self._out.append(frame)
            self._queued += len(frame)
            self._flush_soon()

    def feed(self, frames: Iterator[bytes]) -> None:
        """Send all `frames`; take a frame from the iterator only while less than 256 KiB are waiting to be sent."""
        if self.is_open:
            self._feeds.append(frames)
            self._flush_soon()

    def hold(self, holder: object, held: bool) -> None:
        """Register `holder` if `held`, otherwise remove it. Reading from the host pauses while there is any holder."""
        if held:
            self._holders.add(holder)
        else:
            self._holders.discard(holder)
        if self.is_open:
            self._incoming.want(read=not self._holders)

    def forget(self, number: int) -> None:
        """Remove the call with the id `number`, which has ended."""
        call = self._calls.pop(number, None)
        if call is not None and self._holders:
            self.hold(call, False)

    def call(self, number: int) -> IncomingCall | None:
        """Return the call with the id `number`; None if it is not in progress."""
        return self._calls.get(number)

    def send_last(self, header: Header) -> None:
        """Write the queued frames and one with `header`, as far as possible without blocking. The caller then exits."""
        try:
            os.write(self._files[1], b"".join([*self._out, framing.frame(header)]))
        except OSError:
            pass

    def close(self, why: str, kind: str = "stopped") -> None:
        """Cancel every call and close the channel; a repeated call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        for watch in (self._incoming, self._outgoing):
            watch.close()
        for fd in set(self._files):
            os.close(fd)
        self._out, self._feeds, self._queued = [], [], 0
        for call in list(self._calls.values()):
            call.cancel()
        room_callbacks, self._room_callbacks = self._room_callbacks, []
        for callback in room_callbacks:
            callback()
        self._on_over(kind, why)

    def _read(self) -> None:
        try:
            piece = os.read(self._files[0], _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
            return
        if not piece:
            self.close("end of the channel")
            return
        try:
            for header, body in self._decoder.feed(piece):
                self._take(header, body)
                if not self.is_open:
                    return
        except framing.MalformedFrameError as error:
            self.close("broken frame: " + str(error), "protocol_error")

    def _take(self, header: Header, body: bytes) -> None:
        if "config" in header:
            self._on_config(header["config"])
            return
        number = header.get("id")
        if not isinstance(number, int):
            raise framing.MalformedFrameError("a frame without a call id")
        if "do" in header:
            self._begin(number, header)
            return
        call = self._calls.get(number)
        if call is None:  # The call ended before this frame arrived. Ignore the frame.
            return
        try:
            if header.get("more"):
                call.more(body)
            if header.get("eof"):
                call.eof()
            if header.get("ack"):
                call.ack(int(header["ack"]))
            if header.get("cancel"):
                call.cancel()
        except Exception as error:
            call.crashed("%s: %s" % (type(error).__name__, error))

    def _begin(self, number: int, header: Header) -> None:
        if number in self._calls:
            raise framing.MalformedFrameError("two calls with the same id")
        try:
            call = self._start(self, number, header)
        except CallError as error:
            self.send({"id": number, "error": error.code, "text": str(error)})
        except Exception as error:  # The header is malformed, or the agent has a bug. Fail only this call.
            self.send({"id": number, "error": "bad", "text": "%s: %s" % (type(error).__name__, error)})
        else:
            if call is not None and not call.is_over:
                self._calls[number] = call

    def _flush_soon(self) -> None:
        if not self._flushes and self.is_open:
            self._flushes = True
            self._loop.soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        while self.is_open and (self._out or self._feeds):
            self._fill()
            try:
                written = os.writev(self._files[1], self._out[:64])
            except BlockingIOError:
                self._outgoing.want(write=True)
                return
            except OSError as error:
                self.close(str(error))
                return
            self._drop(written)
            if self._room_callbacks and self._queued < _HIGH_WATER_BYTES // 2:
                room_callbacks, self._room_callbacks = self._room_callbacks, []
                for callback in room_callbacks:
                    callback()
        if self.is_open:
            self._outgoing.want(write=False)

    def _fill(self) -> None:
        while self._feeds and self._queued < _HIGH_WATER_BYTES:
            feed = self._feeds.pop(0)
            frame = next(feed, None)
            if frame is not None:
                self._feeds.append(feed)
                self._out.append(frame)
                self._queued += len(frame)

    def _drop(self, written: int) -> None:
        self._queued -= written
        count = 0
        while written and written >= len(self._out[count]):
            written -= len(self._out[count])
            count += 1
        del self._out[:count]
        if written:
            self._out[0] = self._out[0][written:]
