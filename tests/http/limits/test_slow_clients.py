"""Clients that take their time, on a real socket: none holds memory or a place for ever."""

from __future__ import annotations

import anyio
import pytest

from envkit import clock
from envkit.http.limits import timeouts
from envkit.http.protocol.asgi import Receive, Scope, Send
from envkit.http.server import http_connection
from tests.http.limits.slow import HELLO, Opened, Plain, beside, flood, problem, rest_of
from tests.http.raw import UPGRADE

LARGE = 48 << 20


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
            assert (said["status"], said["detail"]) == (408, "the request head did not arrive within 20 s")
            assert (
                http_connection.HEAD_S
                <= clock.now() - began
                <= http_connection.HEAD_S + 2 * http_connection.CHECK_INTERVAL_S
            )

    beside(main)


def test_who_says_nothing_at_all_is_let_go_without_a_word() -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            assert await rest_of(link) == b""
            assert clock.now() <= http_connection.HEAD_S + 2 * http_connection.CHECK_INTERVAL_S

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
            for _ in range(http_connection.MAX_HEAD_BYTES // 8000 + 2):
                await link.send(endless[:8000])
                await anyio.sleep(0.01)
            assert problem(await rest_of(link))["status"] in (400, 431)
        async with await opened() as link:
            await link.send(start)
            await flood(link, endless)
            assert clock.now() < 2

    beside(main)


@pytest.mark.parametrize("start", [b"GET /v1/health HTTP/1.1\r\n", UPGRADE[:-2]], ids=["request", "socket"])
@pytest.mark.parametrize("size", [http_connection.MAX_HEAD_BYTES + 500, 100_000, 131_000])
def test_a_head_above_its_bound_is_refused_also_when_it_comes_in_one_piece(start: bytes, size: int) -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(start + b"X: " + b"y" * (size - len(start) - 7) + b"\r\n\r\n")
            with anyio.fail_after(60):
                assert problem(await rest_of(link))["status"] == 431

    beside(main)


def test_a_head_just_below_its_bound_is_taken_with_the_body_after_it() -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            head = b"PUT /v1/sessions/a HTTP/1.1\r\nContent-Length: 200000\r\nX: " + b"y" * 60_000 + b"\r\n\r\n"
            await link.send(head + b"x" * 200_000)
            assert (await link.receive()).startswith(b"HTTP/1.1 400 ")  # of the body

    beside(main)


@pytest.mark.parametrize("bytes_per_s", [0, 1])
def test_an_answer_that_nobody_reads_is_dropped(bytes_per_s: int) -> None:
    async def main(opened: Opened) -> None:
        async with await opened() as link:
            await link.send(b"GET /%d HTTP/1.1\r\n\r\n" % LARGE)
            count = 0
            while clock.now() < timeouts.ANSWER_S + 3 * http_connection.CHECK_INTERVAL_S:
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
        await anyio.sleep(2 * http_connection.CHECK_INTERVAL_S)
        async with await opened() as late:
            await late.send(HELLO)
            assert (await late.receive()).startswith(b"HTTP/1.1 200")
        for link in (*links, *crowd):
            await link.aclose()

    beside(main, most=20)
