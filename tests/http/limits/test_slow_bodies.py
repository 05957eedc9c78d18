"""Slow request bodies: each has a minimum rate and a timeout."""

from __future__ import annotations

import tarfile

import anyio
import pytest

from envkit import clock
from envkit.http.limits import timeouts
from envkit.http.protocol.asgi import STALLED_S
from envkit.http.server import http_connection
from tests.http.limits.slow import Connect, SizedAnswers, problem, read_to_end, with_server


@pytest.mark.parametrize("sent", [b"", b"{"], ids=["none of it", "some of it"])
@pytest.mark.parametrize("path", ["/v1/sessions/a", "/v1/sessions/a/step", "/v1/nothing"])
def test_a_missing_body_times_out(path: str, sent: bytes) -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            verb = b"POST" if path.endswith("step") else b"PUT"
            await stream.send(b"%b %b HTTP/1.1\r\nContent-Length: 100\r\n\r\n%b" % (verb, path.encode(), sent))
            received = await read_to_end(stream)
            assert received[:13] in (b"HTTP/1.1 408 ", b"HTTP/1.1 400 ")
            assert b"application/problem+json" in received
            assert clock.now() <= 120

    with_server(main)


@pytest.mark.parametrize(
    "start", ["PUT /v1/sessions/a", "POST /v1/sandboxes/known/exec", "PUT /v1/sandboxes/known/tree?path=never"]
)
def test_a_stalled_body_times_out(start: str) -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(b"PUT /v1/sandboxes/known HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
        began = clock.now()
        async with await connect() as stream:
            await stream.send(f"{start} HTTP/1.1\r\nContent-Length: 100\r\n\r\n{{".encode())
            assert (await stream.receive()).startswith(b"HTTP/1.1 400 ")
        assert STALLED_S <= clock.now() - began < STALLED_S + 1

    with_server(main)


def test_a_trickling_body_times_out_and_a_slow_one_does_not() -> None:
    app = SizedAnswers()

    async def main(connect: Connect) -> None:
        async with await connect() as stream, anyio.create_task_group() as tasks:
            await stream.send(b"PUT /1 HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")

            async def trickle() -> None:
                while True:
                    await anyio.sleep(1)
                    await stream.send(b"x")

            tasks.start_soon(trickle)
            received = problem(await read_to_end(stream))
            tasks.cancel_scope.cancel()
            assert (received["status"], received["detail"]) == (408, "the body arrived more slowly than 16384 bytes/s")
            assert timeouts.BODY_S <= clock.now() <= timeouts.BODY_S + 2 * http_connection.CHECK_INTERVAL_S
        async with await connect() as stream:
            await stream.send(b"PUT /1 HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
            for _ in range(50):
                await anyio.sleep(1)
                await stream.send(b"x" * 20_000)
            assert (await stream.receive()).startswith(b"HTTP/1.1 200")

    with_server(main, app)
    assert app.outcomes == ["the request ended in the middle of its body", "1000000"]


def test_a_fast_start_does_not_allow_a_body_to_trickle_longer() -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream, anyio.create_task_group() as tasks:
            await stream.send(b"PUT /1 HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n" + b"x" * 1_040_000)

            async def trickle() -> None:
                while True:
                    await anyio.sleep(1)
                    await stream.send(b"x")

            tasks.start_soon(trickle)
            received = problem(await read_to_end(stream))
            tasks.cancel_scope.cancel()
            assert (received["status"], received["detail"]) == (408, "the body arrived more slowly than 16384 bytes/s")
            assert clock.now() <= 2 * timeouts.BODY_S + 3 * http_connection.CHECK_INTERVAL_S

    with_server(main, SizedAnswers())


@pytest.mark.parametrize(("what", "is_ended"), [("files?path=a", True), ("tree?path=a", False)])
def test_a_large_buffered_body_must_be_faster_than_one_that_is_streamed_to_disk(what: str, is_ended: bool) -> None:
    start = f"PUT /v1/sandboxes/known/{what} HTTP/1.1\r\nContent-Length: {60 << 20}\r\n\r\n".encode()

    async def main(connect: Connect) -> None:
        async with await connect() as stream:
            await stream.send(b"PUT /v1/sandboxes/known HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
        async with await connect() as stream, anyio.create_task_group() as tasks:
            head = tarfile.TarInfo("tree")
            head.size = 59 << 20
            await stream.send(start + head.tobuf())

            async def send_slowly() -> None:
                while True:
                    await anyio.sleep(1)
                    await stream.send(b"x" * 40_000)

            tasks.start_soon(send_slowly)
            received = b""
            with anyio.move_on_after(300):
                received = await read_to_end(stream)
            tasks.cancel_scope.cancel()
            assert bool(received) == is_ended
            if is_ended:
                assert problem(received)["status"] == 408
                assert clock.now() < timeouts.BODY_S + 3 * http_connection.CHECK_INTERVAL_S

    with_server(main)


def test_a_body_after_an_early_answer_is_not_read_forever() -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as stream, anyio.create_task_group() as tasks:
            await stream.send(b"PUT /v1/sessions/a HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n")

            async def trickle() -> None:
                while True:
                    await stream.send(b"x")
                    await anyio.sleep(1)

            tasks.start_soon(trickle)
            assert (await read_to_end(stream)).startswith(b"HTTP/1.1 413 ")
            assert clock.now() <= http_connection.HEAD_S + 2 * http_connection.CHECK_INTERVAL_S
            tasks.cancel_scope.cancel()

    with_server(main)
