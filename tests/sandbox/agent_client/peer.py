"""The sandbox's end of a channel, played by a test: it reads the frames of the host and emits frames to it."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from envkit import clock
from envkit.sandbox.agent_client.channel import AgentChannel

HELLO: Mapping[str, object] = {"hello": 3}
Header = dict[str, Any]


def frame(header: object, body: bytes = b"") -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">II", len(head), len(body)) + head + body


class Peer:
    """A stream in memory; satisfies `envkit.sandbox.agent_client.channel.Stream`, and works under virtual time.

    Attributes:
        is_closed: Whether the host has closed it.
        sent_bytes: Number of bytes that the host has sent.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.sent_bytes = 0
        self._sent = bytearray()
        self._frames: deque[tuple[Header, bytes]] = deque()
        self._frame_came = asyncio.Event()
        self._coming: deque[bytes] = deque()
        self._something_comes = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()

    async def send(self, data: bytes) -> None:
        if self.is_closed:
            raise ConnectionError("closed")
        self.sent_bytes += len(data)
        self._sent += data
        while len(self._sent) >= 8:
            head, body = struct.unpack_from(">II", self._sent)
            end = 8 + head + body
            if len(self._sent) < end:
                break
            self._frames.append((json.loads(self._sent[8 : 8 + head]), bytes(self._sent[8 + head : end])))
            del self._sent[:end]
        self._frame_came.set()
        await self._free.wait()

    async def receive(self) -> bytes:
        while not self._coming:
            if self.is_closed:
                return b""
            self._something_comes.clear()
            await self._something_comes.wait()
        return self._coming.popleft()

    def close(self) -> None:
        self.is_closed = True
        self._something_comes.set()

    def emit(self, header: object, body: bytes = b"") -> None:
        """Send a frame from the sandbox to the host."""
        self.emit_bytes(frame(header, body))

    def emit_bytes(self, data: bytes) -> None:
        """Send bytes from the sandbox to the host; `b""` ends the stream."""
        self._coming.append(data)
        self._something_comes.set()

    def block_sends(self) -> None:
        """Block every further send of the host."""
        self._free.clear()

    async def next_frame(self) -> tuple[Header, bytes]:
        """Return the next frame from the host."""
        while not self._frames:
            self._frame_came.clear()
            await self._frame_came.wait()
        return self._frames.popleft()

    async def answer(self, *, do: str, body: bytes = b"", **end: object) -> Header:
        """Answer the next call, which must be a `do`, with `body` as data."""
        header, _ = await self.next_frame()
        assert header["do"] == do
        if body:
            self.emit({"id": header["id"], "of": "data"}, body)
        self.emit({"id": header["id"], "end": True, **end})
        return header

    @property
    def unread(self) -> int:
        """Number of pieces from the sandbox that the host has not received."""
        return len(self._coming)

    @property
    def pending_frames(self) -> int:
        """Number of frames from the host that `next_frame` has not returned."""
        return len(self._frames)


async def opened() -> tuple[AgentChannel, Peer]:
    peer = Peer()
    channel = AgentChannel(peer)
    peer.emit(HELLO)
    await channel.open({"work": "/workspace"}, 5)
    assert await peer.next_frame() == ({"config": {"work": "/workspace"}}, b"")
    return channel, peer


def run(main: Callable[[], Awaitable[object]], *, virtual: bool = True) -> None:
    async def bounded() -> None:
        with anyio.fail_after(1000 if virtual else 30):
            await main()

    clock.run(bounded, virtual=virtual)
