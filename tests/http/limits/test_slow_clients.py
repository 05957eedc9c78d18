"""Slow clients on a real socket: none holds memory or a connection forever."""

from __future__ import annotations

import anyio
import pytest

from envkit import clock
from envkit.http.limits import timeouts
from envkit.http.protocol.asgi import Receive, Scope, Send
from envkit.http.server import http_connection
from tests.http.limits.slow import HELLO, Connect, SizedAnswers, flood, problem, read_to_end, with_server
from tests.http.raw import UPGRADE

LARGE = 48 << 20


@pytest.mark.parametrize("before", [b"", HELLO], ids=["at first", "after a request"])
@pytest.mark.parametrize("trickles", [False, True])
def test_an_endless_head_times_out(before: bytes, trickles: bool) -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            if before:
                await stream.send(before)
                assert (await stream.receive()).startswith(b"HTTP/1.1 200")
            began = clock.now()
            await stream.send(b"GET /v1/health HTTP/1.1\r\nX-Slow: ")

            async def trickle() -> None:
                while True:
                    await anyio.sleep(1)
                    await stream.send(b"x")

            async with anyio.create_task_group() as tasks:
                if trickles:
                    tasks.start_soon(trickle)
                received = problem(await read_to_end(stream))
                tasks.cancel_scope.cancel()
            assert (received["status"], received["detail"]) == (408, "the request head did not arrive within 20 s")
            assert (
                http_connection.HEAD_S
                <= clock.now() - began
                <= http_connection.HEAD_S + 2 * http_connection.CHECK_INTERVAL_S
            )

    with_server(main)


def test_a_client_that_sends_nothing_is_disconnected_without_an_answer() -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            assert await read_to_end(stream) == b""
            assert clock.now() <= http_connection.HEAD_S + 2 * http_connection.CHECK_INTERVAL_S

    with_server(main)


def test_a_client_between_two_requests_has_more_time() -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            for _ in range(3):
                await stream.send(HELLO)
                assert (await stream.receive()).startswith(b"HTTP/1.1 200")
                await anyio.sleep(60)

    with_server(main)


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
def test_the_size_of_a_head_is_limited(start: bytes, endless: bytes) -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(start)
            for _ in range(http_connection.MAX_HEAD_BYTES // 8000 + 2):
                await stream.send(endless[:8000])
                await anyio.sleep(0.01)
            assert problem(await read_to_end(stream))["status"] in (400, 431)
        async with await connect() as stream:
            await stream.send(start)
            await flood(stream, endless)
            assert clock.now() < 2

    with_server(main)


@pytest.mark.parametrize("start", [b"GET /v1/health HTTP/1.1\r\n", UPGRADE[:-2]], ids=["request", "socket"])
@pytest.mark.parametrize("size", [http_connection.MAX_HEAD_BYTES + 500, 100_000, 131_000])
def test_a_head_above_its_limit_is_refused_even_if_it_arrives_at_once(start: bytes, size: int) -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(start + b"X: " + b"y" * (size - len(start) - 7) + b"\r\n\r\n")
            with anyio.fail_after(60):
                assert problem(await read_to_end(stream))["status"] == 431

    with_server(main)


def test_a_head_just_below_its_limit_is_accepted_with_its_body() -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            head = b"PUT /v1/sessions/a HTTP/1.1\r\nContent-Length: 200000\r\nX: " + b"y" * 60_000 + b"\r\n\r\n"
            await stream.send(head + b"x" * 200_000)
            assert (await stream.receive()).startswith(b"HTTP/1.1 400 ")  # of the body

    with_server(main)


@pytest.mark.parametrize("bytes_per_s", [0, 1])
def test_an_unread_answer_is_dropped(bytes_per_s: int) -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(b"GET /%d HTTP/1.1\r\n\r\n" % LARGE)
            count = 0
            while clock.now() < timeouts.ANSWER_S + 3 * http_connection.CHECK_INTERVAL_S:
                await anyio.sleep(1)
                if bytes_per_s:
                    count += len(await stream.receive(bytes_per_s))
            assert len(await read_to_end(stream)) + count < LARGE

    with_server(main, SizedAnswers())


def test_a_slowly_read_answer_is_complete() -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(b"GET /%d HTTP/1.1\r\nConnection: close\r\n\r\n" % LARGE)
            count = 0
            while clock.now() < 300:
                await anyio.sleep(1)
                for _ in range(2):
                    count += len(await stream.receive(60_000))
            assert count + len(await read_to_end(stream)) > LARGE

    with_server(main, SizedAnswers())


def test_trailers_are_not_part_of_the_head() -> None:
    headers: list[tuple[bytes, bytes]] = []

    class RecordingAnswers(SizedAnswers):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await super().__call__(scope, receive, send)
            headers.extend(scope.get("headers", ()))

    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            chunks = b"2\r\n{}\r\n0\r\nAuthorization: Bearer ek_1\r\n\r\n"
            await stream.send(b"PUT /1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
            assert (await stream.receive()).startswith(b"HTTP/1.1 200")

    with_server(main, RecordingAnswers())
    assert headers == [(b"transfer-encoding", b"chunked")]


def test_a_disconnect_is_noticed_while_a_pipelined_request_waits() -> None:
    app = SizedAnswers()

    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(b"GET /wait HTTP/1.1\r\n\r\n" + HELLO)
            await anyio.sleep(1)
        await anyio.sleep(1)
        assert app.outcomes == [] or app.outcomes == ["left"]

    with_server(main, app)
    assert app.outcomes == ["left"]


def test_a_full_server_answers_503_and_disconnects_idle_clients() -> None:
    async def main(connect: Connect) -> None:
        streams = [await connect() for _ in range(20)]
        for stream in streams:
            await stream.send(HELLO)
            assert (await stream.receive()).startswith(b"HTTP/1.1 200")
        async with await connect() as late:
            await late.send(HELLO)
            received = await read_to_end(late)
            assert problem(received)["type"] == "no_capacity"
            assert b"retry-after: 1\r\n" in received
        async with await connect() as late:
            await late.send(UPGRADE)
            assert problem(await read_to_end(late))["status"] == 503
        crowd = [await connect() for _ in range(4)]
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)), anyio.fail_after(1):
            await crowd[-1].receive()
        await anyio.sleep(2 * http_connection.CHECK_INTERVAL_S)
        async with await connect() as late:
            await late.send(HELLO)
            assert (await late.receive()).startswith(b"HTTP/1.1 200")
        for stream in (*streams, *crowd):
            await stream.aclose()

    with_server(main, max_connections=20)
