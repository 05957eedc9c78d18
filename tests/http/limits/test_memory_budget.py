"""Memory budget of request bodies."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import anyio
import pytest
from anyio.abc import SocketStream

from envkit import clock
from envkit.errors import CapacityError, RateLimitError
from envkit.http.api.app import create_app
from envkit.http.auth.caller import EVERYBODY, Caller
from envkit.http.limits.memory_budget import WAIT_S, MemoryBudget
from envkit.http.protocol.asgi import RETRY_AFTER_S
from envkit.http.server.middleware import AuthMiddleware
from envkit.http.server.server import serve
from tests.http.envs import slots

Connect: TypeAlias = Callable[[], Awaitable[SocketStream]]
KIB = 1 << 10


async def hold_for(budget: MemoryBudget, tenant: str | None, count: int, seconds: float) -> None:
    await budget.hold(tenant, count)
    await anyio.sleep(seconds)
    budget.free(tenant, count)


def test_a_body_waits_for_memory_and_is_refused_after_the_timeout() -> None:
    async def main() -> None:
        budget = MemoryBudget(100, share=1.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold_for, budget, None, 60, 5)
            await anyio.sleep(1)
            await budget.hold(None, 60)
            assert clock.now() == 5
            with pytest.raises(CapacityError, match="too many bytes of bodies and answers"):
                await budget.hold(None, 60)
            assert clock.now() == 5 + WAIT_S
            await budget.hold(None, 40)
            assert clock.now() == 5 + WAIT_S

    clock.run(main, virtual=True)


def test_a_tenant_gets_its_share_and_leaves_the_rest_to_others() -> None:
    async def main() -> None:
        budget = MemoryBudget(100, share=0.5)
        await budget.hold("ann", 30)
        with pytest.raises(RateLimitError, match="MiB per tenant"):
            await budget.hold("ann", 30)
        assert clock.now() == WAIT_S
        await budget.hold("bob", 50)
        with pytest.raises(CapacityError):
            await budget.hold("carl", 30)
        budget.free("ann", 30)
        await budget.hold("carl", 50)
        assert clock.now() == 2 * WAIT_S

    clock.run(main, virtual=True)


def test_a_body_larger_than_the_budget_passes_alone() -> None:
    async def main() -> None:
        budget = MemoryBudget(100, share=0.5)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold_for, budget, "ann", 500, 3)
            await anyio.sleep(1)
            await budget.hold("bob", 10)
            assert clock.now() == 3

    clock.run(main, virtual=True)


def test_a_body_reserves_its_length_or_grows_and_folders_reserve_nothing() -> None:
    async def reserve(path: str, headers: list[tuple[bytes, bytes]], count: int) -> int:
        budget = MemoryBudget(100, share=0.5)
        return await budget.begin(budget.reservation(Caller("ann")), path, headers).reserve(count)

    async def main() -> None:
        length = [(b"content-length", b"3000000")]
        assert await reserve("/v1/sandboxes/a/files", length, 100_000) == 3_000_000
        assert await reserve("/v1/sandboxes/a/shells/tree", length, 100_000) == 3_000_000
        assert await reserve("/v1/sandboxes/a/files", [], 100_000) == 100_000 + (1 << 20)
        assert await reserve("/v1/sandboxes/a/tree", length, 100_000) > 1 << 60
        budget = MemoryBudget(100 * KIB, share=0.5)
        reservation = budget.reservation(EVERYBODY)
        growing = budget.begin(reservation, "/", [])
        assert await growing.reserve(await growing.reserve(70 * KIB) + 1) > 2 << 20
        reservation.free()
        await budget.hold("bob", 100 * KIB)
        assert clock.now() == 0

    clock.run(main, virtual=True)


def put(name: str, size: int, announced: int) -> bytes:
    return b"PUT /v1/sessions/%b HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (name.encode(), announced) + b" " * size


async def answer(connect: Connect, request: bytes) -> tuple[bytes, str]:
    """Return the head of the answer and the type of its problem."""
    async with await connect() as stream:
        await stream.send(request)
        received = b""
        while b"\r\n\r\n" not in received or not received.endswith(b"}"):
            received += await stream.receive()
        head, _, body = received.partition(b"\r\n\r\n")
        return head, json.loads(body)["type"]


def test_a_full_server_answers_503_with_retry_after_and_accepts_small_bodies() -> None:
    async def main(connect: Connect) -> None:
        async with await connect() as slow:
            await slow.send(put("a", 200 * KIB, announced=400 * KIB))
            await anyio.sleep(0.1)
            began = clock.now()
            head, kind = await answer(connect, put("b", KIB, announced=KIB))
            assert (head.partition(b"\r\n")[0], kind) == (b"HTTP/1.1 400 Bad Request", "bad_request")
            assert clock.now() - began < 1
            head, kind = await answer(connect, put("c", 200 * KIB, announced=200 * KIB))
            assert (head.partition(b"\r\n")[0], kind) == (b"HTTP/1.1 503 Service Unavailable", "no_capacity")
            assert b"retry-after: %d\r\n" % RETRY_AFTER_S in head + b"\r\n"
            assert clock.now() - began == pytest.approx(WAIT_S, abs=1)
        _, kind = await answer(connect, put("d", 200 * KIB, announced=200 * KIB))
        assert kind == "bad_request"

    async def run() -> None:
        ports: list[int] = []
        is_ready = anyio.Event()

        def on_ready(address: str) -> None:
            ports.append(int(address.rpartition(":")[2]))
            is_ready.set()

        async def connect() -> SocketStream:
            return await anyio.connect_tcp("127.0.0.1", ports[0])

        async with slots() as host, anyio.create_task_group() as tasks:
            middleware = AuthMiddleware(create_app(host), bodies=MemoryBudget(500 * KIB, share=0.5))
            tasks.start_soon(partial(serve, middleware, port=0, on_ready=on_ready, handle_signals=False, drain_s=1))
            await is_ready.wait()
            await main(connect)
            tasks.cancel_scope.cancel()

    clock.run(run, virtual=True)
