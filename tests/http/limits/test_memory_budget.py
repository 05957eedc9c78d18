"""Memory budget of large bodies and replies, on a real server."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from anyio.abc import SocketStream

from envkit import clock
from envkit.errors import CapacityError
from envkit.http.api.app import create_app
from envkit.http.limits.memory_budget import WAIT_S, MemoryBudget
from envkit.http.server.middleware import AuthMiddleware
from envkit.http.server.request_context import STALLED_S
from tests.http.envs import listening, slots
from tests.http.pools import pool_of
from tests.http.remote_sandboxes import scripted

MIB = 1 << 20


class Stage:
    """A server with one sandbox, ``a``, and the memory budget `budget`."""

    def __init__(self, address: str, budget: MemoryBudget, client: httpx.AsyncClient) -> None:
        self.port = int(address.rpartition(":")[2])
        self.budget = budget
        self.client = client

    async def exec(self, *argv: str, output_bytes: int = MIB, headers: dict[str, str] | None = None) -> httpx.Response:
        body = {"argv": argv, "timeout_s": 600, "max_output_bytes": output_bytes}
        return await self.client.post("/v1/sandboxes/a/exec", json=body, headers=headers)

    async def connect(self) -> SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)


def on_stage(main: Callable[[Stage], Awaitable[None]], max_bytes: int) -> None:
    async def run() -> None:
        budget = MemoryBudget(max_bytes)
        async with slots() as host, scripted() as backend, pool_of(backend) as pool:
            middleware = AuthMiddleware(create_app(host, pool=pool), bodies=budget)
            async with (
                listening(middleware) as address,
                httpx.AsyncClient(base_url=address, trust_env=False, timeout=None) as client,
            ):
                assert (await client.put("/v1/sandboxes/a", json={})).status_code == 200
                await main(Stage(address, budget, client))
                await anyio.sleep(0.1)
                assert budget.held_bytes == 0

    clock.run(run, virtual=True)


def test_a_request_waits_for_memory_and_is_refused_after_the_timeout() -> None:
    async def main() -> None:
        budget = MemoryBudget(10 * MIB)
        first, second, third = budget.reservation(), budget.reservation(), budget.reservation()

        async def hold() -> None:
            await first.reserve(6 * MIB)
            await anyio.sleep(5)
            first.free()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold)
            await anyio.sleep(1)
            await second.reserve(6 * MIB)
            assert clock.now() == 5
            with pytest.raises(CapacityError, match=r"large bodies and replies \(limit 10 MiB\); retry later"):
                await third.reserve(6 * MIB)
            assert clock.now() == 5 + WAIT_S
            await third.reserve(4 * MIB)
            await third.reserve(MIB)
            assert budget.held_bytes == 10 * MIB

    clock.run(main, virtual=True)


def test_a_request_larger_than_the_budget_passes_alone() -> None:
    async def main() -> None:
        budget = MemoryBudget(2 * MIB)
        await budget.reservation().reserve(50 * MIB)
        with pytest.raises(CapacityError):
            await budget.reservation().reserve(2 * MIB, within_s=0)

    clock.run(main, virtual=True)


def test_programs_run_at_once_as_far_as_the_memory_for_their_outputs_suffices() -> None:
    async def main(stage: Stage) -> None:
        ended: list[float] = []

        async def run() -> None:
            assert (await stage.exec("sleep", "3", output_bytes=4 * MIB)).status_code == 200
            ended.append(clock.now() - began)

        began = clock.now()
        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(run)
            await anyio.sleep(1)
            assert stage.budget.held_bytes == 40 * MIB
        assert sorted(ended) == pytest.approx([3] * 5 + [6], abs=0.2)

    on_stage(main, 40 * MIB)


def test_a_call_without_memory_is_refused_and_not_run_and_small_calls_run() -> None:
    async def main(stage: Stage) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(stage.exec, output_bytes=4 * MIB), "sleep", "60")
            await anyio.sleep(1)
            refused = await stage.exec("count", output_bytes=4 * MIB)
            assert (refused.status_code, refused.json()["type"]) == (503, "no_capacity")
            assert refused.headers["retry-after"] == "1"
            assert clock.now() == pytest.approx(1 + WAIT_S, abs=0.5)
            assert (await stage.exec("echo", "hello")).json()["stdout"] == "echo hello"
            assert clock.now() == pytest.approx(1 + WAIT_S, abs=0.5)
        assert (await stage.exec("count", output_bytes=4 * MIB)).json()["stdout"] == "1"

    on_stage(main, 10 * MIB)


def test_a_reply_counts_at_its_size_until_it_is_read_or_the_reader_stalls() -> None:
    body = json.dumps({"argv": ["say", str(12 * MIB), "x"], "timeout_s": 60, "max_output_bytes": 20 * MIB}).encode()
    request = b"POST /v1/sandboxes/a/exec HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def main(stage: Stage) -> None:
        async with await stage.connect() as stream:
            await stream.send(request)
            count = len(await stream.receive())
            await anyio.sleep(20)
            assert 12 * MIB < stage.budget.held_bytes < 13 * MIB
            while count < 12 * MIB:
                count += len(await stream.receive())
            await anyio.sleep(0.1)
            assert stage.budget.held_bytes == 0
            await stream.send(b"GET /v1/health HTTP/1.1\r\n\r\n")
            assert b"HTTP/1.1 200 OK" in await stream.receive()
        async with await stage.connect() as stream:
            await stream.send(request)
            await stream.receive()
        await anyio.sleep(0.1)
        assert stage.budget.held_bytes == 0
        async with await stage.connect() as stream:
            await stream.send(request)
            await anyio.sleep(STALLED_S + 5)
            assert stage.budget.held_bytes == 0

    on_stage(main, 100 * MIB)


def test_a_large_body_and_a_large_file_are_counted() -> None:
    async def main(stage: Stage) -> None:
        path = "/v1/sandboxes/a/files?path=/workspace/large"
        assert (await stage.client.put(path, content=b"x" * 12 * MIB)).status_code == 200
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(stage.exec, output_bytes=16 * MIB), "sleep", "8")
            await anyio.sleep(1)
            assert len((await stage.client.get(path)).content) == 12 * MIB
            assert 8 <= clock.now() < 9
            tasks.start_soon(partial(stage.exec, output_bytes=31 * MIB), "sleep", "60")
            await anyio.sleep(1)
            refused = await stage.client.put(path, content=b"x" * 12 * MIB)
            assert (refused.status_code, refused.json()["type"]) == (503, "no_capacity")

    on_stage(main, 64 * MIB)


def test_a_list_of_programs_has_a_limit_on_all_its_outputs_together() -> None:
    async def main(stage: Stage) -> None:
        program: dict[str, Any] = {"sandbox_id": "a", "timeout_s": 9, "max_output_bytes": 16 * MIB, "argv": ["true"]}
        refused = await stage.client.post("/v1/sandboxes:exec", json=[program] * 9)
        assert (refused.status_code, refused.json()["type"]) == (400, "bad_request")
        assert "the sum of the output limits in the list is too large" in refused.json()["detail"]
        assert (await stage.client.post("/v1/sandboxes:exec", json=[program] * 8)).status_code == 200

    on_stage(main, 256 * MIB)


def test_outputs_full_of_control_characters_do_not_grow_when_encoded() -> None:
    async def main(stage: Stage) -> None:
        answer = await stage.exec("say", "1000000", "\x07")
        assert set(answer.json()["stdout"]) == {"base64"}
        assert len(answer.content) < 1_500_000
        assert (await stage.exec("say", "100", "\x07")).json()["stdout"] == "\x07" * 100
        assert (await stage.exec("say", "100000", "\r\n\t")).json()["stdout"] == "\r\n\t" * 100_000

    on_stage(main, 10 * MIB)
