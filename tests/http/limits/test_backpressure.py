"""How much sockets hold at once: who does not read is not read on, and keeps nobody out who does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import anyio
import pytest
from anyio.abc import SocketStream

from envkit import clock
from envkit.http.api.app import create_app
from envkit.http.limits.memory_budget import MemoryBudget
from envkit.http.server import http_connection
from envkit.http.server.middleware import AuthMiddleware
from envkit.http.server.server import serve
from envkit.http.server.websocket_connection import MAX_PAUSE_S
from tests.http.boxes import scripted
from tests.http.envs import slots
from tests.http.pools import SmallPool
from tests.http.raw import UPGRADE, frame

MIB = 1 << 20
TASK = b'"env_id":"Count-v0","seed":1,"options":{"end":100000}'
CREATE = b'{"id":0,"method":"create","params":{"session_id":"%b",' + TASK + b"}}"
EXEC = b'"sandbox_id":"a","argv":["sleep","%d"],"timeout_s":3600,"max_output_bytes":9,"stdin":"' + b"A" * 600_000 + b'"'
STEP = b'{"id":%d,"method":"step","params":{"session_id":"%b","turn":%d,"action":"%b"}}'


class Stage:
    """A server of which sockets may hold half of `most` bytes."""

    def __init__(self, port: int, bodies: MemoryBudget) -> None:
        self.bodies = bodies
        self._port = port

    async def opened(self, session: bytes | None = None) -> SocketStream:
        link = await anyio.connect_tcp("127.0.0.1", self._port)
        await link.send(UPGRADE)
        assert (await link.receive()).startswith(b"HTTP/1.1 101")
        if session is not None:
            await link.send(frame(CREATE % session))
            assert b'"result"' in await link.receive()
        return link


def on_stage(main: Callable[[Stage], Awaitable[None]], most: int) -> None:
    async def run() -> None:
        ports: list[int] = []
        is_ready = anyio.Event()

        def on_ready(address: str) -> None:
            ports.append(int(address.rpartition(":")[2]))
            is_ready.set()

        bodies = MemoryBudget(most)
        async with slots() as host, scripted() as backend, anyio.create_task_group() as tasks:
            guard = AuthMiddleware(create_app(host, pool=SmallPool(backend)), bodies=bodies)
            tasks.start_soon(partial(serve, guard, port=0, on_ready=on_ready, handle_signals=False, drain_s=1))
            await is_ready.wait()
            await main(Stage(ports[0], bodies))
            await anyio.sleep(1)
            assert bodies.sockets.total == 0
            tasks.cancel_scope.cancel()

    clock.run(run, virtual=True)


async def flood(link: SocketStream, session: bytes, size: int, turns: int = 1000) -> int:
    """Step without reading answers, until nothing is taken any more; return how many steps were."""
    turn = 0
    with suppress(anyio.BrokenResourceError), anyio.move_on_after(5):
        for turn in range(turns):
            await link.send(frame(STEP % (turn, session, turn, b"x" * size)))
    return turn


def test_answers_that_nobody_reads_stop_a_socket_when_sockets_hold_enough_and_no_other() -> None:
    async def main(stage: Stage) -> None:
        async with await stage.opened(b"a") as silent, await stage.opened(b"b") as reader:
            await flood(silent, b"a", 900_000)
            assert 8 * MIB < stage.bodies.sockets.total < 12 * MIB
            for turn in range(50):
                await reader.send(frame(STEP % (turn, b"b", turn, b"on")))
                assert b'"result"' in await reader.receive()
            assert clock.now() < 6
            with suppress(anyio.EndOfStream):
                while stage.bodies.sockets.total:
                    await silent.receive()
            await flood(silent, b"a", 10, turns=3)

    on_stage(main, 16 * MIB)


ASKED = {
    "steps": STEP % (1, b"a", 0, b"long"),  # the same turn again, whose answer is half a MiB
    "others": b'{"id":1,"method":"session","params":{"session_id":"a"}}',
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_what_little_asks_for_much_of_is_not_all_held(asked: bytes) -> None:
    async def main(stage: Stage) -> None:
        async with await stage.opened() as link:
            create = CREATE.replace(b"}}}", b',"padding":"%b"}}}' % (b"x" * 500_000))
            await link.send(frame(create.replace(b"%b", b"a")))
            assert b'"result"' in await link.receive()
            await link.send(frame(b"[%b]" % b",".join([asked] * 900)))
            await anyio.sleep(1)
            assert 8 * MIB < stage.bodies.sockets.total < 60 * MIB
            count = 0
            while count < 900 * 500_000:
                count += len(await link.receive())
            await anyio.sleep(0.1)
            assert stage.bodies.sockets.total == 0

    on_stage(main, 16 * MIB)


def test_what_frames_ask_for_counts_until_it_is_answered() -> None:
    async def main(stage: Stage) -> None:
        async with await stage.opened() as link:
            await link.send(frame(b'{"id":0,"method":"sandbox.create","params":{"sandbox_id":"a"}}'))
            assert b'"result"' in await link.receive()
            sent = 0
            with anyio.move_on_after(5):
                while True:
                    await link.send(frame(b'{"id":1,"method":"sandbox.exec","params":{%b}}' % (EXEC % 20)))
                    sent += 1
            assert 8 * MIB < stage.bodies.sockets.total < 11 * MIB
            assert sent < 40
            await anyio.sleep(20)
            assert stage.bodies.sockets.total < 8 * MIB

    on_stage(main, 16 * MIB)


def test_a_message_that_is_not_complete_counts_and_is_ended_where_there_is_no_room() -> None:
    async def main(stage: Stage) -> None:
        async with await stage.opened() as first, await stage.opened() as second:
            large = frame(b'{"id":1,"method":"health","params":{"x":"%b"}}' % (b"y" * 6 * MIB))
            await first.send(large[:-10])
            await anyio.sleep(0.1)
            assert 6 * MIB < stage.bodies.sockets.total < 6.1 * MIB
            with anyio.move_on_after(3):
                await second.send(large[:-10])
                await anyio.sleep_forever()
            assert 8 * MIB < stage.bodies.sockets.total < 9 * MIB
            said = b""
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    said += await second.receive()
            assert b"retry later" in said
            assert clock.now() < MAX_PAUSE_S + 3 * http_connection.CHECK_INTERVAL_S
            await first.send(large[-10:])
            said = b""
            while b"too_large" not in said:
                said += await first.receive()
            await anyio.sleep(2 * http_connection.CHECK_INTERVAL_S)
            assert stage.bodies.sockets.total == 0

    on_stage(main, 16 * MIB)


def test_a_message_that_is_alone_may_be_larger_than_all_may_be_together() -> None:
    async def main(stage: Stage) -> None:
        async with await stage.opened() as link:
            large = frame(b'{"id":1,"method":"health","params":{"x":"%b"}}' % (b"y" * 6 * MIB))
            await link.send(large[:-10])
            await anyio.sleep(MAX_PAUSE_S + 3 * http_connection.CHECK_INTERVAL_S)
            await link.send(large[-10:])
            said = b""
            while b"too_large" not in said:
                said += await link.receive()

    on_stage(main, 4 * MIB)


def test_what_came_in_one_message_after_another_is_not_counted_once_it_was_taken() -> None:
    async def main(stage: Stage) -> None:
        async with await stage.opened() as link:
            large = frame(b'{"id":1,"method":"health","params":{"x":"%b"}}' % (b"y" * 200_000))
            for part in (large[:150_000], large[150_000:]):  # it is counted from now on
                await link.send(part)
                await anyio.sleep(0.1)
            await link.receive()
            for _ in range(100):
                await link.send(frame(b'{"id":1,"method":"health","params":{"x":"%b"}}' % (b"y" * 50_000)))
                await link.receive()
                assert stage.bodies.sockets.total < MIB

    on_stage(main, 16 * MIB)


def test_who_leaves_while_sockets_hold_too_much_is_heard_and_what_it_began_is_ended() -> None:
    async def main(stage: Stage) -> None:
        link = await stage.opened()
        await link.send(frame(b'{"id":0,"method":"sandbox.create","params":{"sandbox_id":"a"}}'))
        assert b'"result"' in await link.receive()
        with anyio.move_on_after(5):
            while True:
                await link.send(frame(b'{"id":1,"method":"sandbox.exec","params":{%b}}' % (EXEC % 3000)))
        assert stage.bodies.sockets.total > 8 * MIB
        await link.aclose()
        await anyio.sleep(60)
        assert stage.bodies.sockets.total == 0

    on_stage(main, 16 * MIB)


@pytest.mark.parametrize("message", [b"[]", b"[1]", b"{}"])
def test_messages_that_ask_for_nothing_do_no_harm(message: bytes) -> None:
    async def main(stage: Stage) -> None:
        async with await stage.opened() as link:
            await link.send(frame(message))
            await link.send(frame(b'{"id":1,"method":"health"}'))
            said = b""
            while b"alive" not in said:
                said += await link.receive()

    on_stage(main, 16 * MIB)
