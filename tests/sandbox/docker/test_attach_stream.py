"""A container's streams: split frames, refusals, and the end of the stream."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.sandbox.docker.attach_stream import AttachStream, attach

GRANTED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


def frame(kind: int, content: bytes) -> bytes:
    return struct.pack(">BxxxL", kind, len(content)) + content


def meet(
    daemon: Callable[[anyio.abc.SocketStream], Awaitable[None]],
    client: Callable[[AttachStream], Awaitable[None]],
    folder: Path,
    refusal: str | None = None,
) -> None:
    """Connect `client` to a `daemon` that serves one connection; the attach request is read before `daemon` runs."""

    async def main() -> None:
        path = str(folder / "docker.sock")

        async def serve(connection: anyio.abc.SocketStream) -> None:
            async with connection:
                assert (await connection.receive()).startswith(b"POST /attach HTTP/1.1\r\n")
                await daemon(connection)

        with anyio.fail_after(20):
            listener = await anyio.create_unix_listener(path)
            async with listener, anyio.create_task_group() as tasks:
                tasks.start_soon(listener.serve, serve)
                if refusal is None:
                    stream = await attach(path, "/attach")
                    await client(stream)
                    stream.close()
                else:
                    with pytest.raises(ConnectionError, match=refusal):
                        await attach(path, "/attach")
                tasks.cancel_scope.cancel()

    clock.run(main)


@pytest.mark.parametrize("size", [1, 9])
def test_output_is_reassembled_from_frames_split_anywhere(size: int, tmp_path: Path) -> None:
    reported = GRANTED + frame(1, b"one ") + frame(2, b"no") + frame(1, b"") + frame(1, b"two " * 20) + frame(2, b"pe")

    async def daemon(connection: anyio.abc.SocketStream) -> None:
        for start in range(0, len(reported), size):
            await connection.send(reported[start : start + size])
            await anyio.lowlevel.checkpoint()

    async def client(stream: AttachStream) -> None:
        output = b""
        while piece := await stream.receive():
            output += piece
        assert (output, await stream.last_stderr()) == (b"one " + b"two " * 20, b"nope")

    meet(daemon, client, tmp_path)


def test_a_slow_reader_blocks_the_daemon(tmp_path: Path) -> None:
    sent = 0

    async def daemon(connection: anyio.abc.SocketStream) -> None:
        nonlocal sent
        await connection.send(GRANTED)
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

    meet(daemon, client, tmp_path)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            b"HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\n\r\nNo such container: x\r\n",
            "^No such container: x$",
        ),
        (b'HTTP/1.1 409 Conflict\r\nContent-Length: 20\r\n\r\n{"message":"paused"}', "^paused$"),
        (b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n", "^HTTP/1.1 500 Internal Server Error$"),
        (b"", "^the Docker daemon closed the connection$"),
    ],
)
def test_a_refusal_reports_the_reason(answer: bytes, why: str, tmp_path: Path) -> None:
    async def daemon(connection: anyio.abc.SocketStream) -> None:
        for start in range(len(answer)):
            await connection.send(answer[start : start + 1])

    async def client(stream: AttachStream) -> None:
        raise AssertionError("it was granted")

    meet(daemon, client, tmp_path, refusal=why)


def test_connecting_to_a_closed_port_is_an_error_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConnectionError, match="the Docker daemon does not answer: No such file"):
            await attach(str(tmp_path / "none.sock"), "/attach")
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
        with pytest.raises(ConnectionError, match="the Docker daemon does not answer"):
            await attach(address, "/attach")

    clock.run(main)
