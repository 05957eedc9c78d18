"""A container's streams: split frames, a slow reader, and the end of the stream."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.sandbox.agent_client.socket_stream import SocketStream
from envkit.sandbox.docker.attach_stream import AttachStream


def frame(kind: int, content: bytes) -> bytes:
    return struct.pack(">BxxxL", kind, len(content)) + content


def meet(
    daemon: Callable[[SocketStream], Awaitable[None]],
    client: Callable[[AttachStream], Awaitable[None]],
) -> None:
    """Connect `client` to a `daemon` that serves one connection."""

    async def main() -> None:
        ours, theirs = [await SocketStream.open(end) for end in socket.socketpair()]

        async def serve() -> None:
            await daemon(theirs)
            await theirs.end()

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                await client(AttachStream(ours))
        ours.close()
        theirs.close()

    clock.run(main)


@pytest.mark.parametrize("size", [1, 9])
def test_output_is_reassembled_from_frames_split_anywhere(size: int) -> None:
    reported = frame(1, b"one ") + frame(2, b"no") + frame(1, b"") + frame(1, b"two " * 20) + frame(2, b"pe")

    async def daemon(connection: SocketStream) -> None:
        for start in range(0, len(reported), size):
            await connection.send(reported[start : start + size])
            await anyio.lowlevel.checkpoint()

    async def client(stream: AttachStream) -> None:
        output = b""
        while piece := await stream.receive():
            output += piece
        assert (output, await stream.last_stderr()) == (b"one " + b"two " * 20, b"nope")

    meet(daemon, client)


def test_a_slow_reader_blocks_the_daemon() -> None:
    sent = 0

    async def daemon(connection: SocketStream) -> None:
        nonlocal sent
        piece = frame(1, b"y" * 32768)
        for _ in range(512):
            await connection.send(piece)
            sent += 32768

    async def client(stream: AttachStream) -> None:
        before = -1
        while before != sent:  # until nothing more is taken
            before = sent
            await anyio.sleep(0.1)
        assert sent < 4 << 20
        received = 0
        while piece := await stream.receive():
            received += len(piece)
        assert received == 16 << 20

    meet(daemon, client)
