"""The box's end of a channel, in the hands of a test, which reads what arrives there and says what comes."""

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

HELLO: Mapping[str, object] = {"hello": 3, "pid": 1, "python": "3.11", "uid": 0}
Header = dict[str, Any]


def frame(header: object, body: bytes = b"") -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">II", len(head), len(body)) + head + body


class Peer:
    """A stream in memory; satisfies `envkit.sandbox.agent_client.channel.Stream`, and works under virtual time.

    Attributes:
        is_closed: Whether the host has let go of it.
        sent_bytes: How much the host has sent.
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

    def say(self, header: object, body: bytes = b"") -> None:
        """Have a frame come from the box."""
        self.say_bytes(frame(header, body))

    def say_bytes(self, data: bytes) -> None:
        """Have bytes come from the box; none is the end."""
        self._coming.append(data)
        self._something_comes.set()

    def take_nothing(self) -> None:
        """Let the host wait from now on until it may send more."""
        self._free.clear()

    async def heard(self) -> tuple[Header, bytes]:
        """Return the next frame from the host."""
        while not self._frames:
            self._frame_came.clear()
            await self._frame_came.wait()
        return self._frames.popleft()

    async def answer(self, *, do: str, body: bytes = b"", **end: object) -> Header:
        """Answer the next call, which must be a `do`, with `body` as data."""
        header, _ = await self.heard()
        assert header["do"] == do
        if body:
            self.say({"id": header["id"], "of": "data"}, body)
        self.say({"id": header["id"], "end": True, **end})
        return header

    @property
    def unread(self) -> int:
        """Number of times that something came from the box which the host has not taken."""
        return len(self._coming)

    @property
    def unheard(self) -> int:
        """Number of frames that were sent and not looked at."""
        return len(self._frames)


async def opened() -> tuple[AgentChannel, Peer]:
    peer = Peer()
    channel = AgentChannel(peer)
    peer.say(HELLO)
    await channel.open({"work": "/workspace"}, 5)
    assert await peer.heard() == ({"config": {"work": "/workspace"}}, b"")
    return channel, peer


def run(main: Callable[[], Awaitable[object]], *, virtual: bool = True) -> None:
    async def bounded() -> None:
        with anyio.fail_after(1000 if virtual else 30):
            await main()

    clock.run(bounded, virtual=virtual)
