"""Sockets as streams of a channel."""

from __future__ import annotations

import socket

import anyio
import anyio.lowlevel
import pytest

from envkit.sandbox.agent_client.channel import SocketStream
from tests.sandbox.agent_client.peer import run


async def pair() -> tuple[SocketStream, SocketStream]:
    ours, theirs = socket.socketpair()
    return await SocketStream.open(ours), await SocketStream.open(theirs)


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
