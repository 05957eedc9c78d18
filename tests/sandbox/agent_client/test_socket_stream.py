"""Sockets as streams of a channel."""

from __future__ import annotations

import json
import socket
import struct

import anyio
import anyio.lowlevel
import pytest

from envkit.sandbox.agent_client.channel import AgentChannel, SocketStream
from tests.sandbox.agent_client.peer import HELLO, frame, run


async def pair() -> tuple[SocketStream, SocketStream]:
    ours, theirs = socket.socketpair()
    return SocketStream(ours), SocketStream(theirs)


def test_a_socket_carries_more_than_it_holds_in_both_directions_at_once() -> None:
    async def main() -> None:
        one, other = await pair()
        content = bytes(range(256)) * (5 << 12)

        async def sends(stream: SocketStream) -> None:
            for start in range(0, len(content), 700_001):
                await stream.send(content[start : start + 700_001])
            await stream.end()

        async def receives(stream: SocketStream) -> None:
            taken = bytearray()
            while data := await stream.receive():
                taken += data
            assert taken == content

        async with anyio.create_task_group() as tasks:
            for stream in (one, other):
                tasks.start_soon(sends, stream)
                tasks.start_soon(receives, stream)
        one.close()
        other.close()

    run(main, virtual=False)


def test_overlapping_sends_do_not_mix() -> None:
    async def main() -> None:
        one, other = await pair()
        taken = bytearray()
        async with anyio.create_task_group() as tasks:
            for letter in b"abcdef":
                tasks.start_soon(one.send, bytes([letter]) * 1_000_000)
            await anyio.sleep(0.05)
            while len(taken) < 6_000_000:
                taken += await other.receive()
        assert [taken[at] for at in range(0, 6_000_000, 1_000_000)] == list(b"abcdef")
        assert all(len(set(taken[at : at + 1_000_000])) == 1 for at in range(0, 6_000_000, 1_000_000))
        one.close()
        other.close()

    run(main, virtual=False)


def test_what_was_sent_just_before_the_end_arrives() -> None:
    async def main() -> None:
        one, other = await pair()
        await one.send(b"a")
        await one.send(b"b")
        one.close()
        assert await other.receive() == b"ab"
        assert await other.receive() == b""
        other.close()

    run(main, virtual=False)


def test_what_is_sent_at_one_turn_of_the_loop_is_sent_at_once() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps what is sent at once together
        one, other = SocketStream(ours), SocketStream(theirs)
        async with anyio.create_task_group() as tasks:
            for letter in (b"a", b"b", b"c"):
                tasks.start_soon(one.send, letter)
        assert await other.receive() == b"abc"
        one.close()
        other.close()

    run(main, virtual=False)


def test_a_sender_waits_for_a_receiver_and_hears_when_that_is_gone() -> None:
    async def main() -> None:
        one, other = await pair()
        with anyio.move_on_after(0.05) as limit:
            while True:
                await one.send(b"x" * 500_000)
        assert limit.cancelled_caught
        other.close()
        with pytest.raises(ConnectionError):
            await one.send(b"x")
        one.close()
        one.close()
        assert await one.receive() == b""

    run(main, virtual=False)


def test_whatever_the_system_says_about_it_a_stream_that_cannot_be_sent_to_is_gone() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair(type=socket.SOCK_DGRAM)
        ours.setblocking(False)
        stream = SocketStream(ours)
        with pytest.raises(ConnectionError, match="Message too long"):
            await stream.send(bytes(10 << 20))
        stream.close()
        theirs.close()

    run(main, virtual=False)


def test_closing_wakes_who_waits() -> None:
    async def main() -> None:
        one, other = await pair()
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                assert await one.receive() == b""

            tasks.start_soon(wait)
            await anyio.sleep(0.01)
            one.close()
        assert await other.receive() == b""
        other.close()

    run(main, virtual=False)


def test_sixteen_callers_share_one_socket() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        peer = SocketStream(theirs)
        await peer.send(frame(HELLO))
        channel = AgentChannel(SocketStream(ours))
        await channel.open({}, 5)

        async def echo() -> None:
            waiting = bytearray()
            while data := await peer.receive():
                waiting += data
                while len(waiting) >= 8 and len(waiting) >= 8 + sum(struct.unpack_from(">II", waiting)):
                    head, body = struct.unpack_from(">II", waiting)
                    header = json.loads(waiting[8 : 8 + head])
                    del waiting[: 8 + head + body]
                    if "do" in header:
                        answer = frame({"id": header["id"], "of": "data"}, header["path"].encode())
                        await peer.send(answer + frame({"id": header["id"], "end": True}))

        async def ask(caller: int) -> None:
            for number in range(50):
                path = f"{caller}/{number}"
                assert (await channel.call("read", path=path, max_bytes=20)).data == path.encode()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(echo)
            async with anyio.create_task_group() as callers:
                for caller in range(16):
                    callers.start_soon(ask, caller)
            channel.close()
        peer.close()

    run(main, virtual=False)
