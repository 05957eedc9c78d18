"""Limits of one WebSocket: a client that does not read is paused, and does not block others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import pytest
from anyio.abc import SocketStream

from envkit import clock
from envkit.http.api.app import create_app
from envkit.http.limits.websocket_queues import MAX_OWED, MAX_UNREAD_BYTES, Inbox, Outbox
from envkit.http.protocol.asgi import Message
from envkit.http.server.middleware import AuthMiddleware
from tests.http.envs import listening, slots
from tests.http.raw import UPGRADE, frame

TASK = b'"env_id":"Count-v0","seed":1,"options":{"end":100000}'
CREATE = b'{"id":0,"method":"create","params":{"session_id":"%b",' + TASK + b"}}"
STEP = b'{"id":%d,"method":"step","params":{"session_id":"%b","turn":%d,"action":"%b"}}'
Connect = Callable[[bytes], Awaitable[SocketStream]]


def on_stage(main: Callable[[Connect], Awaitable[None]]) -> None:
    async def run() -> None:
        async def connect(session: bytes) -> SocketStream:
            stream = await anyio.connect_tcp("127.0.0.1", int(address.rpartition(":")[2]))
            await stream.send(UPGRADE)
            assert (await stream.receive()).startswith(b"HTTP/1.1 101")
            await stream.send(frame(CREATE % session))
            assert b'"result"' in await stream.receive()
            return stream

        async with slots() as host, listening(AuthMiddleware(create_app(host))) as address:
            await main(connect)

    clock.run(run, virtual=True)


def test_a_socket_whose_replies_are_not_read_is_paused_and_no_other() -> None:
    async def main(connect: Connect) -> None:
        async with await connect(b"a") as stalled, await connect(b"b") as reader:
            sent = 0
            with anyio.move_on_after(5):
                for turn in range(1000):
                    await stalled.send(frame(STEP % (turn, b"a", turn, b"x" * 900_000)))
                    sent = turn
            assert sent < 60
            for turn in range(50):
                await reader.send(frame(STEP % (turn, b"b", turn, b"on")))
                assert b'"result"' in await reader.receive()
            assert clock.now() < 6

    on_stage(main)


def test_a_paused_socket_whose_client_leaves_drops_its_messages_and_ends_its_pause() -> None:
    async def main() -> None:
        arriving: list[Message] = [
            {"type": "websocket.receive", "text": "unread"},
            {"type": "websocket.disconnect", "code": 1006},
        ]

        async def receive() -> Message:
            await anyio.sleep(1)
            return arriving.pop(0)

        inbox = Inbox(receive)
        await inbox.pause_until(anyio.sleep_forever)
        assert clock.now() == 2
        assert (await inbox.take())["type"] == "websocket.disconnect"

    clock.run(main, virtual=True)


def test_only_a_socket_that_answers_pings_remains_open() -> None:
    async def main(connect: Connect) -> None:
        async with await connect(b"a") as silent, await connect(b"b") as idle, anyio.create_task_group() as tasks:

            async def answer_pings() -> None:
                while True:
                    ping = await idle.receive()
                    assert ping[:2] == b"\x89\x04"
                    await idle.send(b"\x8a\x84\0\0\0\0" + ping[2:6])

            tasks.start_soon(answer_pings)
            with suppress(anyio.EndOfStream):
                while True:
                    await silent.receive()
            assert 120 < clock.now() < 160
            await anyio.sleep(300)
            tasks.cancel_scope.cancel()

    on_stage(main)


def test_a_queue_is_full_above_its_limit_until_the_client_reads() -> None:
    async def main() -> None:
        outbox, sent = Outbox(), anyio.Event()

        async def send(message: object) -> None:
            await sent.wait()

        outbox.owed = MAX_OWED
        outbox.put(b"x" * MAX_UNREAD_BYTES)
        assert not outbox.is_behind
        outbox.put(b"x")
        assert outbox.is_full
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outbox.run, send)
            await anyio.sleep(1)
            assert outbox.is_full
            sent.set()
            await outbox.wait_for_reader()
            assert outbox.owed == MAX_OWED - 2
            tasks.cancel_scope.cancel()

    clock.run(main, virtual=True)


@pytest.mark.parametrize("message", [b"[]", b"[1]", b"{}"])
def test_empty_messages_do_no_harm(message: bytes) -> None:
    async def main(connect: Connect) -> None:
        async with await connect(b"a") as stream:
            await stream.send(frame(message))
            await stream.send(frame(b'{"id":1,"method":"health"}'))
            received = b""
            with suppress(anyio.EndOfStream):
                while b"alive" not in received:
                    received += await stream.receive()
            assert b"alive" in received

    on_stage(main)
