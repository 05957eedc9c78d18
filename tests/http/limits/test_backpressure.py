"""Memory limit of sockets: a client that does not read is paused, and does not block others."""

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
from tests.http.envs import slots
from tests.http.pools import SmallPool
from tests.http.raw import UPGRADE, frame
from tests.http.remote_sandboxes import scripted

MIB = 1 << 20
TASK = b'"env_id":"Count-v0","seed":1,"options":{"end":100000}'
CREATE = b'{"id":0,"method":"create","params":{"session_id":"%b",' + TASK + b"}}"
EXEC = b'"sandbox_id":"a","argv":["sleep","%d"],"timeout_s":3600,"max_output_bytes":9,"stdin":"' + b"A" * 600_000 + b'"'
STEP = b'{"id":%d,"method":"step","params":{"session_id":"%b","turn":%d,"action":"%b"}}'


class Stage:
    """A server whose sockets share half of the budget."""

    def __init__(self, port: int, budget: MemoryBudget) -> None:
        self.budget = budget
        self._port = port

    async def connect(self, session: bytes | None = None) -> SocketStream:
        stream = await anyio.connect_tcp("127.0.0.1", self._port)
        await stream.send(UPGRADE)
        assert (await stream.receive()).startswith(b"HTTP/1.1 101")
        if session is not None:
            await stream.send(frame(CREATE % session))
            assert b'"result"' in await stream.receive()
        return stream


def on_stage(main: Callable[[Stage], Awaitable[None]], max_bytes: int) -> None:
    async def run() -> None:
        ports: list[int] = []
        is_ready = anyio.Event()

        def on_ready(address: str) -> None:
            ports.append(int(address.rpartition(":")[2]))
            is_ready.set()

        budget = MemoryBudget(max_bytes)
        async with slots() as host, scripted() as backend, anyio.create_task_group() as tasks:
            middleware = AuthMiddleware(create_app(host, pool=SmallPool(backend)), bodies=budget)
            tasks.start_soon(partial(serve, middleware, port=0, on_ready=on_ready, handle_signals=False, drain_s=1))
            await is_ready.wait()
            await main(Stage(ports[0], budget))
            await anyio.sleep(1)
            assert budget.sockets.total == 0
            tasks.cancel_scope.cancel()

    clock.run(run, virtual=True)


async def flood(stream: SocketStream, session: bytes, size: int, turns: int = 1000) -> int:
    """Send steps without reading answers until the server stops reading; return their number."""
    turn = 0
    with suppress(anyio.BrokenResourceError), anyio.move_on_after(5):
        for turn in range(turns):
            await stream.send(frame(STEP % (turn, session, turn, b"x" * size)))
    return turn


def test_unread_answers_pause_their_socket_at_the_memory_limit_and_no_other() -> None:
    async def main(stage: Stage) -> None:
        async with await stage.connect(b"a") as stalled, await stage.connect(b"b") as reader:
            await flood(stalled, b"a", 900_000)
            assert 8 * MIB < stage.budget.sockets.total < 12 * MIB
            for turn in range(50):
                await reader.send(frame(STEP % (turn, b"b", turn, b"on")))
                assert b'"result"' in await reader.receive()
            assert clock.now() < 6
            with suppress(anyio.EndOfStream):
                while stage.budget.sockets.total:
                    await stalled.receive()
            await flood(stalled, b"a", 10, turns=3)

    on_stage(main, 16 * MIB)


SMALL_FRAMES = {
    "steps": STEP % (1, b"a", 0, b"long"),  # a repeated turn, whose answer is half a MiB
    "others": b'{"id":1,"method":"session","params":{"session_id":"a"}}',
}


@pytest.mark.parametrize("small", SMALL_FRAMES.values(), ids=SMALL_FRAMES)
def test_large_answers_to_small_frames_stay_within_the_memory_limit(small: bytes) -> None:
    async def main(stage: Stage) -> None:
        async with await stage.connect() as stream:
            create = CREATE.replace(b"}}}", b',"padding":"%b"}}}' % (b"x" * 500_000))
            await stream.send(frame(create.replace(b"%b", b"a")))
            assert b'"result"' in await stream.receive()
            await stream.send(frame(b"[%b]" % b",".join([small] * 900)))
            await anyio.sleep(1)
            assert 8 * MIB < stage.budget.sockets.total < 60 * MIB
            count = 0
            while count < 900 * 500_000:
                count += len(await stream.receive())
            await anyio.sleep(0.1)
            assert stage.budget.sockets.total == 0

    on_stage(main, 16 * MIB)


def test_pending_frames_count_until_they_are_answered() -> None:
    async def main(stage: Stage) -> None:
        async with await stage.connect() as stream:
            await stream.send(frame(b'{"id":0,"method":"sandbox.create","params":{"sandbox_id":"a"}}'))
            assert b'"result"' in await stream.receive()
            sent = 0
            with anyio.move_on_after(5):
                while True:
                    await stream.send(frame(b'{"id":1,"method":"sandbox.exec","params":{%b}}' % (EXEC % 20)))
                    sent += 1
            assert 8 * MIB < stage.budget.sockets.total < 11 * MIB
            assert sent < 40
            await anyio.sleep(20)
            assert stage.budget.sockets.total < 8 * MIB

    on_stage(main, 16 * MIB)


def test_an_incomplete_message_counts_and_is_refused_above_the_memory_limit() -> None:
    async def main(stage: Stage) -> None:
        async with await stage.connect() as first, await stage.connect() as second:
            large = frame(b'{"id":1,"method":"health","params":{"x":"%b"}}' % (b"y" * 6 * MIB))
            await first.send(large[:-10])
            await anyio.sleep(0.1)
            assert 6 * MIB < stage.budget.sockets.total < 6.1 * MIB
            with anyio.move_on_after(3):
                await second.send(large[:-10])
                await anyio.sleep_forever()
            assert 8 * MIB < stage.budget.sockets.total < 9 * MIB
            received = b""
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    received += await second.receive()
            assert b"retry later" in received
            assert clock.now() < MAX_PAUSE_S + 3 * http_connection.CHECK_INTERVAL_S
            await first.send(large[-10:])
            received = b""
            while b"too_large" not in received:
                received += await first.receive()
            await anyio.sleep(2 * http_connection.CHECK_INTERVAL_S)
            assert stage.budget.sockets.total == 0

    on_stage(main, 16 * MIB)


def test_a_single_message_may_exceed_the_memory_limit() -> None:
    async def main(stage: Stage) -> None:
        async with await stage.connect() as stream:
            large = frame(b'{"id":1,"method":"health","params":{"x":"%b"}}' % (b"y" * 6 * MIB))
            await stream.send(large[:-10])
            await anyio.sleep(MAX_PAUSE_S + 3 * http_connection.CHECK_INTERVAL_S)
            await stream.send(large[-10:])
            received = b""
            while b"too_large" not in received:
                received += await stream.receive()

    on_stage(main, 4 * MIB)


def test_processed_messages_are_no_longer_counted() -> None:
    async def main(stage: Stage) -> None:
        async with await stage.connect() as stream:
            large = frame(b'{"id":1,"method":"health","params":{"x":"%b"}}' % (b"y" * 200_000))
            for part in (large[:150_000], large[150_000:]):  # it is counted from now on
                await stream.send(part)
                await anyio.sleep(0.1)
            await stream.receive()
            for _ in range(100):
                await stream.send(frame(b'{"id":1,"method":"health","params":{"x":"%b"}}' % (b"y" * 50_000)))
                await stream.receive()
                assert stage.budget.sockets.total < MIB

    on_stage(main, 16 * MIB)


def test_a_disconnect_of_a_paused_socket_is_noticed_and_ends_its_calls() -> None:
    async def main(stage: Stage) -> None:
        stream = await stage.connect()
        await stream.send(frame(b'{"id":0,"method":"sandbox.create","params":{"sandbox_id":"a"}}'))
        assert b'"result"' in await stream.receive()
        with anyio.move_on_after(5):
            while True:
                await stream.send(frame(b'{"id":1,"method":"sandbox.exec","params":{%b}}' % (EXEC % 3000)))
        assert stage.budget.sockets.total > 8 * MIB
        await stream.aclose()
        await anyio.sleep(60)
        assert stage.budget.sockets.total == 0

    on_stage(main, 16 * MIB)


@pytest.mark.parametrize("message", [b"[]", b"[1]", b"{}"])
def test_empty_messages_do_no_harm(message: bytes) -> None:
    async def main(stage: Stage) -> None:
        async with await stage.connect() as stream:
            await stream.send(frame(message))
            await stream.send(frame(b'{"id":1,"method":"health"}'))
            received = b""
            while b"alive" not in received:
                received += await stream.receive()

    on_stage(main, 16 * MIB)
