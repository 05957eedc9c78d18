"""WebSockets with slow clients or endless messages."""

from __future__ import annotations

import struct
from contextlib import suppress

import anyio
import pytest

from envkit import clock
from envkit.http.limits import timeouts
from envkit.http.server import http_connection
from tests.http.limits.slow import Connect, flood, read_to_end, with_server
from tests.http.raw import UPGRADE, frame


def test_an_idle_socket_is_kept_open_while_it_answers_pings() -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(UPGRADE)
            assert (await stream.receive()).startswith(b"HTTP/1.1 101")
            while clock.now() < 600:
                ping = await stream.receive()
                assert ping[:2] == b"\x89\x04"
                await stream.send(b"\x8a\x84\0\0\0\0" + ping[2:6])
            await stream.send(frame(b'{"id":1,"method":"health","params":{}}'))
            assert b'"result"' in await stream.receive()

    with_server(main)


def test_a_socket_that_answers_no_pings_is_closed() -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(UPGRADE)
            assert (await read_to_end(stream)).startswith(b"HTTP/1.1 101")
            assert clock.now() < 160

    with_server(main)


def test_a_socket_that_reads_no_answers_is_closed() -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(UPGRADE)
            assert (await stream.receive()).startswith(b"HTTP/1.1 101")
            task = b'"session_id":"a","env_id":"Count-v0","seed":1,"options":{"end":100000}'
            await stream.send(frame(b'{"id":0,"method":"create","params":{%b}}' % task))
            assert b'"result"' in await stream.receive()
            count = 0
            with anyio.fail_after(600), suppress(anyio.BrokenResourceError):
                while True:
                    step = b'"session_id":"a","turn":%d,"action":"%b"' % (count, b"x" * 900_000)
                    await stream.send(frame(b'{"id":1,"method":"step","params":{%b}}' % step))
                    count += 1
            assert 50 < count < 200

    with_server(main)


def test_unread_pongs_close_a_socket_before_they_fill_the_memory() -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(UPGRADE)
            pings = (b"\x89\xfd\0\0\0\0" + b"x" * 125) * 1000
            assert (await stream.receive()).startswith(b"HTTP/1.1 101")
            await flood(stream, pings)
            assert clock.now() < 5

    with_server(main)


FRAGMENTS = {
    "many": b"\x01\x80\0\0\0\0" + b"\x00\x80\0\0\0\0" * 20_000,
    "large": b"\x81\xff" + struct.pack(">Q", 9 << 20) + b"\0" * 5000,
}


@pytest.mark.parametrize("fragments", FRAGMENTS.values(), ids=FRAGMENTS)
def test_an_endless_message_is_refused(fragments: bytes) -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(UPGRADE)
            assert (await stream.receive()).startswith(b"HTTP/1.1 101")
            await stream.send(fragments)
            received = await read_to_end(stream)
            assert received[-60:].count(b"the message") == 1
            assert clock.now() <= timeouts.BODY_S + 2 * http_connection.CHECK_INTERVAL_S

    with_server(main)
