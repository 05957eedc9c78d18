"""WebSockets whose clients take their time, or say what never ends."""

from __future__ import annotations

import struct
from contextlib import suppress

import anyio
import pytest

from envkit import clock
from envkit.http.limits import timeouts
from envkit.http.server import http_connection
from tests.http.limits.slow import Opened, beside, flood, rest_of
from tests.http.raw import UPGRADE, frame


def test_a_socket_that_says_nothing_may_stay_as_long_as_it_answers_pings() -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(UPGRADE)
            assert (await link.receive()).startswith(b"HTTP/1.1 101")
            while clock.now() < 600:
                ping = await link.receive()
                assert ping[:2] == b"\x89\x04"
                await link.send(b"\x8a\x84\0\0\0\0" + ping[2:6])
            await link.send(frame(b'{"id":1,"method":"health","params":{}}'))
            assert b'"result"' in await link.receive()

    beside(main)


def test_a_socket_that_answers_no_pings_is_let_go() -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(UPGRADE)
            assert (await rest_of(link)).startswith(b"HTTP/1.1 101")
            assert clock.now() < 160

    beside(main)


def test_a_socket_that_reads_no_answers_is_let_go() -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(UPGRADE)
            assert (await link.receive()).startswith(b"HTTP/1.1 101")
            task = b'"session_id":"a","env_id":"Count-v0","seed":1,"options":{"end":100000}'
            await link.send(frame(b'{"id":0,"method":"create","params":{%b}}' % task))
            assert b'"result"' in await link.receive()
            count = 0
            with anyio.fail_after(600), suppress(anyio.BrokenResourceError):
                while True:
                    step = b'"session_id":"a","turn":%d,"action":"%b"' % (count, b"x" * 900_000)
                    await link.send(frame(b'{"id":1,"method":"step","params":{%b}}' % step))
                    count += 1
            assert 50 < count < 200

    beside(main)


def test_pings_whose_answers_nobody_reads_end_a_socket_before_they_fill_the_memory() -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(UPGRADE)
            pings = (b"\x89\xfd\0\0\0\0" + b"x" * 125) * 1000
            assert (await link.receive()).startswith(b"HTTP/1.1 101")
            await flood(link, pings)
            assert clock.now() < 5

    beside(main)


PIECES = {
    "many": b"\x01\x80\0\0\0\0" + b"\x00\x80\0\0\0\0" * 20_000,
    "large": b"\x81\xff" + struct.pack(">Q", 9 << 20) + b"\0" * 5000,
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_a_message_that_never_ends_is_not_kept(pieces: bytes) -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(UPGRADE)
            assert (await link.receive()).startswith(b"HTTP/1.1 101")
            await link.send(pieces)
            said = await rest_of(link)
            assert said[-40:].count(b"the message") == 1
            assert clock.now() <= timeouts.BODY_S + 2 * http_connection.CHECK_INTERVAL_S

    beside(main)
