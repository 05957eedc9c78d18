"""Bodies of requests that take their time: each has a least speed, and none is waited for for ever."""

from __future__ import annotations

import tarfile

import anyio
import pytest

from envkit import clock
from envkit.http.limits import timeouts
from envkit.http.protocol.asgi import STALLED_S
from envkit.http.server import http_connection
from tests.http.limits.slow import Opened, Plain, beside, problem, rest_of


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
        assert STALLED_S <= clock.now() - began < STALLED_S + 1

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
            assert (said["status"], said["detail"]) == (408, "the body arrived more slowly than 16384 bytes/s")
            assert timeouts.BODY_S <= clock.now() <= timeouts.BODY_S + 2 * http_connection.CHECK_INTERVAL_S
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
            assert (said["status"], said["detail"]) == (408, "the body arrived more slowly than 16384 bytes/s")
            assert clock.now() <= 2 * timeouts.BODY_S + 3 * http_connection.CHECK_INTERVAL_S

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
                assert clock.now() < timeouts.BODY_S + 3 * http_connection.CHECK_INTERVAL_S

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
            assert clock.now() <= http_connection.HEAD_S + 2 * http_connection.CHECK_INTERVAL_S
            tasks.cancel_scope.cancel()

    beside(main)
