"""Clients that take their time, on a real socket: none holds memory or a place for ever."""

from __future__ import annotations

import json
import struct
import tarfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import anyio
import pytest
from anyio.abc import SocketStream

from envkit import clock
from envkit.http import connections
from envkit.http.app import create_app
from envkit.http.asgi import SILENT_S, Receive, Scope, Send, read_body, respond
from envkit.http.server import serve
from envkit.sandbox import trees
from envkit.sandbox.fake import FakeBackend
from tests.http.pools import SmallPool
from tests.http.raw import UPGRADE, frame
from tests.http.worlds import slots

Opened: TypeAlias = Callable[[], Awaitable[SocketStream]]
HELLO = b"GET /v1/health HTTP/1.1\r\n\r\n"
LARGE = 48 << 20


class Plain:
    """Answers each request with as many bytes as its path says, and notes what becomes of it."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for what in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{what}.complete"})
            return
        try:
            body = await read_body(scope, receive, 1 << 20)
            if scope["path"] == "/wait":
                while (await receive())["type"] != "http.disconnect":
                    pass
                self.said.append("left")
            else:
                await respond(send, b"x" * int(scope["path"][1:]))
                self.said.append(f"{len(body)}")
        except Exception as error:
            self.said.append(str(error))

    async def drain(self, timeout_s: float) -> None:
        pass


def beside(main: Callable[[Opened], Awaitable[None]], app: Plain | None = None, most: int | None = None) -> None:
    """Run `main` beside a server, in virtual time, in which nothing is slow but who wants to be."""

    async def run() -> None:
        addresses: list[str] = []
        is_ready = anyio.Event()

        def on_ready(address: str) -> None:
            addresses.append(address)
            is_ready.set()

        async def opened() -> SocketStream:
            host, port = addresses[0].removeprefix("http://").split(":")
            return await anyio.connect_tcp(host, int(port))

        async with slots() as host, FakeBackend() as backend, anyio.create_task_group() as tasks:
            served_app = app or create_app(host, pool=SmallPool(backend), trees=trees)
            served = partial(serve, served_app, port=0, on_ready=on_ready, handle_signals=False)
            tasks.start_soon(partial(served, drain_s=1, max_connections=most))
            await is_ready.wait()
            await main(opened)
            tasks.cancel_scope.cancel()

    clock.run(run, virtual=True)


async def flood(link: SocketStream, data: bytes) -> int:
    """Send for as long as it is taken, and return how many bytes were."""
    count = 0
    with suppress(anyio.BrokenResourceError):
        while True:
            await link.send(data)
            count += len(data)
    return count


async def rest_of(link: SocketStream) -> bytes:
    """Return what comes until the server closes."""
    said = b""
    try:
        while True:
            said += await link.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return said


def problem(said: bytes) -> dict[str, Any]:
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json\r\n" in head
    assert b"connection: close" in head
    found: dict[str, Any] = json.loads(body)
    assert head.startswith(b"HTTP/1.1 %d " % found["status"])
    return found


@pytest.mark.parametrize("before", [b"", HELLO], ids=["at first", "after a request"])
@pytest.mark.parametrize("trickles", [False, True])
def test_a_head_that_never_ends_is_not_waited_for(before: bytes, trickles: bool) -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            if before:
                await link.send(before)
                assert (await link.receive()).startswith(b"HTTP/1.1 200")
            began = clock.now()
            await link.send(b"GET /v1/health HTTP/1.1\r\nX-Slow: ")

            async def trickle() -> None:
                while True:
                    await anyio.sleep(1)
                    await link.send(b"x")

            async with anyio.create_task_group() as tasks:
                if trickles:
                    tasks.start_soon(trickle)
                said = problem(await rest_of(link))
                tasks.cancel_scope.cancel()
            assert (said["status"], said["detail"]) == (408, "the head of the request was not there within 20 s")
            assert connections.HEAD_S <= clock.now() - began <= connections.HEAD_S + 2 * connections.LOOK_S

    beside(main)


def test_who_says_nothing_at_all_is_let_go_without_a_word() -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            assert await rest_of(link) == b""
            assert clock.now() <= connections.HEAD_S + 2 * connections.LOOK_S

    beside(main)


def test_who_is_between_two_requests_has_longer() -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            for _ in range(3):
                await link.send(HELLO)
                assert (await link.receive()).startswith(b"HTTP/1.1 200")
                await anyio.sleep(60)

    beside(main)


@pytest.mark.parametrize(
    "endless",
    [
        b"X: " + b"y" * 8000 + b"\r\n",
        b"x" * 8000,
        b"X: y\r\n" * 2000,
    ],
    ids=["headers", "one header", "many headers"],
)
@pytest.mark.parametrize(
    "start",
    [b"GET /v1/health HTTP/1.1\r\nA: ", b"PUT /v1/sessions/a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: "],
    ids=["head", "trailer"],
)
def test_a_head_has_no_more_than_its_bytes(start: bytes, endless: bytes) -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(start)
            for _ in range(connections.MAX_HEAD_BYTES // 8000 + 2):
                await link.send(endless[:8000])
                await anyio.sleep(0.01)
            assert problem(await rest_of(link))["status"] in (400, 431)
        async with await opened() as link:
            await link.send(start)
            await flood(link, endless)
            assert clock.now() < 2

    beside(main)


@pytest.mark.parametrize("sent", [b"", b"{"], ids=["none of it", "some of it"])
@pytest.mark.parametrize("path", ["/v1/sessions/a", "/v1/sessions/a/step", "/v1/nothing"])
def test_a_body_that_never_comes_is_not_waited_for(path: str, sent: bytes) -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            verb = b"POST" if path.endswith("step") else b"PUT"
            await link.send(b"%b %b HTTP/1.1\r\nContent-Length: 100\r\n\r\n%b" % (verb, path.encode(), sent))
            said = await rest_of(link)
            assert said[:13] in (b"HTTP/1.1 408 ", b"HTTP/1.1 400 ")
            assert b"application/problem+json" in said
            assert clock.now() <= 120

    beside(main)


@pytest.mark.parametrize(
    "start", ["PUT /v1/sessions/a", "POST /v1/sandboxes/known/exec", "PUT /v1/sandboxes/known/tree?path=never"]
)
def test_a_body_that_stops_is_not_waited_for(start: str) -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(b"PUT /v1/sandboxes/known HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
            assert (await link.receive()).startswith(b"HTTP/1.1 200 ")
        began = clock.now()
        async with await opened() as link:
            await link.send(f"{start} HTTP/1.1\r\nContent-Length: 100\r\n\r\n{{".encode())
            assert (await link.receive()).startswith(b"HTTP/1.1 400 ")
        assert SILENT_S <= clock.now() - began < SILENT_S + 1

    beside(main)


def test_a_body_that_trickles_is_not_waited_for_and_one_that_is_just_slow_is() -> None:
    app = Plain()

    async def main(opened: Opened) -> None:
        async with await opened() as link, anyio.create_task_group() as tasks:
            await link.send(b"PUT /1 HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")

            async def trickle() -> None:
                while True:
                    await anyio.sleep(1)
                    await link.send(b"x")

            tasks.start_soon(trickle)
            said = problem(await rest_of(link))
            tasks.cancel_scope.cancel()
            assert (said["status"], said["detail"]) == (408, "the body came with less than 16384 bytes a second")
            assert connections.BODY_S <= clock.now() <= connections.BODY_S + 2 * connections.LOOK_S
        async with await opened() as link:
            await link.send(b"PUT /1 HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
            for _ in range(50):
                await anyio.sleep(1)
                await link.send(b"x" * 20_000)
            assert (await link.receive()).startswith(b"HTTP/1.1 200")

    beside(main, app)
    assert app.said == ["the request ended in the middle of its body", "1000000"]


def test_a_body_that_came_fast_at_first_may_not_trickle_for_longer() -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link, anyio.create_task_group() as tasks:
            await link.send(b"PUT /1 HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n" + b"x" * 1_040_000)

            async def trickle() -> None:
                while True:
                    await anyio.sleep(1)
                    await link.send(b"x")

            tasks.start_soon(trickle)
            said = problem(await rest_of(link))
            tasks.cancel_scope.cancel()
            assert (said["status"], said["detail"]) == (408, "the body came with less than 16384 bytes a second")
            assert clock.now() <= 2 * connections.BODY_S + 3 * connections.LOOK_S

    beside(main, Plain())


@pytest.mark.parametrize(("what", "is_ended"), [("files?path=a", True), ("tree?path=a", False)])
def test_a_large_body_that_is_held_has_to_be_faster_than_one_that_goes_to_the_disk(what: str, is_ended: bool) -> None:
    start = f"PUT /v1/sandboxes/known/{what} HTTP/1.1\r\nContent-Length: {60 << 20}\r\n\r\n".encode()

    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(b"PUT /v1/sandboxes/known HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
            assert (await link.receive()).startswith(b"HTTP/1.1 200 ")
        async with await opened() as link, anyio.create_task_group() as tasks:
            head = tarfile.TarInfo("tree")
            head.size = 59 << 20
            await link.send(start + head.tobuf())

            async def send_slowly() -> None:
                while True:
                    await anyio.sleep(1)
                    await link.send(b"x" * 40_000)

            tasks.start_soon(send_slowly)
            said = b""
            with anyio.move_on_after(300):
                said = await rest_of(link)
            tasks.cancel_scope.cancel()
            assert bool(said) == is_ended
            if is_ended:
                assert problem(said)["status"] == 408
                assert clock.now() < connections.BODY_S + 3 * connections.LOOK_S

    beside(main)


def test_what_comes_after_an_early_answer_is_not_taken_for_ever() -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link, anyio.create_task_group() as tasks:
            await link.send(b"PUT /v1/sessions/a HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n")

            async def trickle() -> None:
                while True:
                    await link.send(b"x")
                    await anyio.sleep(1)

            tasks.start_soon(trickle)
            assert (await rest_of(link)).startswith(b"HTTP/1.1 413 ")
            assert clock.now() <= connections.HEAD_S + 2 * connections.LOOK_S
            tasks.cancel_scope.cancel()

    beside(main)


@pytest.mark.parametrize("bytes_per_s", [0, 1])
def test_an_answer_that_nobody_reads_is_dropped(bytes_per_s: int) -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(b"GET /%d HTTP/1.1\r\n\r\n" % LARGE)
            count = 0
            while clock.now() < connections.ANSWER_S + 3 * connections.LOOK_S:
                await anyio.sleep(1)
                if bytes_per_s:
                    count += len(await link.receive(bytes_per_s))
            assert len(await rest_of(link)) + count < LARGE

    beside(main, Plain())


def test_an_answer_that_is_read_slowly_comes_whole() -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(b"GET /%d HTTP/1.1\r\nConnection: close\r\n\r\n" % LARGE)
            count = 0
            while clock.now() < 300:
                await anyio.sleep(1)
                for _ in range(2):
                    count += len(await link.receive(60_000))
            assert count + len(await rest_of(link)) > LARGE

    beside(main, Plain())


def test_what_comes_after_a_body_is_no_part_of_the_head() -> None:
    headers: list[tuple[bytes, bytes]] = []

    class Noting(Plain):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await super().__call__(scope, receive, send)
            headers.extend(scope.get("headers", ()))

    async def main(opened: Opened) -> None:
        async with await opened() as link:
            chunks = b"2\r\n{}\r\n0\r\nAuthorization: Bearer ek_1\r\n\r\n"
            await link.send(b"PUT /1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
            assert (await link.receive()).startswith(b"HTTP/1.1 200")

    beside(main, Noting())
    assert headers == [(b"transfer-encoding", b"chunked")]


def test_who_leaves_while_another_request_waits_behind_is_missed() -> None:
    app = Plain()

    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(b"GET /wait HTTP/1.1\r\n\r\n" + HELLO)
            await anyio.sleep(1)
        await anyio.sleep(1)
        assert app.said == [] or app.said == ["left"]

    beside(main, app)
    assert app.said == ["left"]


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
            assert clock.now() <= connections.BODY_S + 2 * connections.LOOK_S

    beside(main)


def test_who_comes_when_all_places_are_taken_is_told_and_who_does_nothing_makes_room() -> None:
    async def main(opened: Opened) -> None:
        links = [await opened() for _ in range(20)]
        for link in links:
            await link.send(HELLO)
            assert (await link.receive()).startswith(b"HTTP/1.1 200")
        async with await opened() as late:
            await late.send(HELLO)
            said = await rest_of(late)
            assert problem(said)["type"] == "no_capacity"
            assert b"retry-after: 1\r\n" in said
        async with await opened() as late:
            await late.send(UPGRADE)
            assert problem(await rest_of(late))["status"] == 503
        crowd = [await opened() for _ in range(4)]
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)), anyio.fail_after(1):
            await crowd[-1].receive()
        await anyio.sleep(2 * connections.LOOK_S)
        async with await opened() as late:
            await late.send(HELLO)
            assert (await late.receive()).startswith(b"HTTP/1.1 200")
        for link in (*links, *crowd):
            await link.aclose()

    beside(main, most=20)
