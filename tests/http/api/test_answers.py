"""Memory budget of answers: their maximum is reserved before the call begins."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import anyio
import httpx
import pytest
from anyio.abc import SocketStream

from envkit import clock
from envkit.errors import CapacityError
from envkit.http.api.app import create_app
from envkit.http.auth.caller import EVERYBODY
from envkit.http.auth.tokens import TokenStore
from envkit.http.limits import timeouts
from envkit.http.limits.memory_budget import WAIT_S, MemoryBudget
from envkit.http.server import http_connection
from envkit.http.server.middleware import AuthMiddleware
from envkit.http.server.server import serve
from envkit.sandbox.transfer import tar_stream
from tests.http.envs import slots
from tests.http.pools import SmallPool
from tests.http.remote_sandboxes import scripted

MIB = 1 << 20
Asked: TypeAlias = Callable[..., Awaitable[httpx.Response]]


class Stage:
    """A server with one sandbox, ``a``, and the memory budget `budget`."""

    def __init__(self, address: str, budget: MemoryBudget, client: httpx.AsyncClient) -> None:
        self.port = int(address.rpartition(":")[2])
        self.budget = budget
        self.client = client

    async def exec(self, *argv: str, output_bytes: int = MIB, headers: dict[str, str] | None = None) -> httpx.Response:
        body = {"argv": argv, "timeout_s": 600, "max_output_bytes": output_bytes}
        return await self.client.post("/v1/sandboxes/a/exec", json=body, headers=headers)

    async def record(
        self, outcomes: dict[str, tuple[float, int]], name: str, *argv: str, output_bytes: int = MIB
    ) -> None:
        """Run a program; record the time and the status of the answer."""
        status = (await self.exec(*argv, output_bytes=output_bytes)).status_code
        outcomes[name] = round(clock.now(), 1), status

    async def connect(self) -> SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)


@asynccontextmanager
async def served(budget: MemoryBudget, tokens: TokenStore | None = None) -> AsyncIterator[Stage]:
    addresses: list[str] = []
    is_ready = anyio.Event()

    def on_ready(address: str) -> None:
        addresses.append(address)
        is_ready.set()

    async with slots() as host, scripted() as backend, anyio.create_task_group() as tasks:
        app = create_app(host, pool=SmallPool(backend), folder_transport=tar_stream)
        middleware = AuthMiddleware(app, tokens, bodies=budget)
        tasks.start_soon(partial(serve, middleware, port=0, on_ready=on_ready, handle_signals=False, drain_s=1))
        await is_ready.wait()
        async with httpx.AsyncClient(base_url=addresses[0], trust_env=False, timeout=None) as client:
            if tokens is None:
                assert (await client.put("/v1/sandboxes/a", json={})).status_code == 200
            yield Stage(addresses[0], budget, client)
        tasks.cancel_scope.cancel()


def on_stage(main: Callable[[Stage], Awaitable[None]], max_bytes: int) -> None:
    async def run() -> None:
        async with served(MemoryBudget(max_bytes)) as stage:
            await main(stage)
            await anyio.sleep(0.1)
            assert stage.budget.held == 0

    clock.run(run, virtual=True)


def test_programs_run_at_once_as_far_as_the_memory_for_their_outputs_suffices() -> None:
    async def main(stage: Stage) -> None:
        outcomes: dict[str, tuple[float, int]] = {}
        began = clock.now()
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(partial(stage.record, output_bytes=4 * MIB), outcomes, f"first {number}", "sleep", "3")
            await anyio.sleep(1)
            assert stage.budget.held == 40 * MIB
            tasks.start_soon(partial(stage.record, output_bytes=4 * MIB), outcomes, "late", "sleep", "3")
        assert sorted(at - began for at, _ in outcomes.values()) == pytest.approx([3] * 5 + [6], abs=0.2)
        assert {status for _, status in outcomes.values()} == {200}

    on_stage(main, 80 * MIB)


def test_many_programs_with_small_outputs_run_at_once() -> None:
    async def main(stage: Stage) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(30):
                tasks.start_soon(stage.exec, "sleep", "3")
            await anyio.sleep(1)
            assert stage.budget.held == 30 * 2 * MIB // 16
            answer = await stage.exec("say", str(MIB), "x")
            assert len(answer.json()["stdout"]) == MIB

    on_stage(main, 4 * MIB)


def test_an_answer_counts_at_its_actual_size_even_if_less_was_reserved() -> None:
    async def main() -> None:
        budget = MemoryBudget(2 * MIB)
        reservation = budget.reservation(EVERYBODY)
        await reservation.expect(MIB // 8)
        reservation.settle(3 * MIB)
        assert budget.held == 3 * MIB
        with pytest.raises(CapacityError):
            await budget.reservation(EVERYBODY).expect(MIB // 8, within_s=0)
        reservation.free()
        assert budget.held == 0

    clock.run(main, virtual=True)


def test_a_call_without_memory_is_refused_after_the_timeout_and_not_run() -> None:
    async def main(stage: Stage) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(stage.exec, output_bytes=4 * MIB), "sleep", "60")
            await anyio.sleep(1)
            refused = await stage.exec("count", output_bytes=4 * MIB)
            assert (refused.status_code, refused.json()["type"]) == (503, "no_capacity")
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["content-type"] == "application/problem+json"
            assert clock.now() == pytest.approx(1 + WAIT_S, abs=0.5)
            assert (await stage.exec("echo", "hello", output_bytes=1000)).json()["stdout"] == "echo hello"
            assert clock.now() == pytest.approx(1 + WAIT_S, abs=0.5)
        assert (await stage.exec("count", output_bytes=4 * MIB)).json()["stdout"] == "1"

    on_stage(main, 10 * MIB)


def test_large_requests_leave_half_of_the_budget_to_small_ones() -> None:
    async def main(stage: Stage) -> None:
        outcomes: dict[str, tuple[float, int]] = {}
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(partial(stage.record, output_bytes=8 * MIB), outcomes, f"much {number}", "sleep", "5")
            await anyio.sleep(1)
            assert stage.budget.held == 32 * MIB
            await stage.record(outcomes, "little", "echo")
            assert clock.now() < 2
        assert sorted(round(at) for at, _ in outcomes.values()) == [1, 5, 5, 10]

    on_stage(main, 64 * MIB)


def test_an_answer_counts_at_its_size_until_it_is_read_or_dropped() -> None:
    body = json.dumps({"argv": ["say", str(12 * MIB), "x"], "timeout_s": 60, "max_output_bytes": 20 * MIB}).encode()
    request = b"POST /v1/sandboxes/a/exec HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def main(stage: Stage) -> None:
        async with await stage.connect() as stream:
            await stream.send(request)
            count = len(await stream.receive())
            await anyio.sleep(20)
            assert 12 * MIB < stage.budget.held < 13 * MIB
            while count < 12 * MIB:
                count += len(await stream.receive())
            await anyio.sleep(0.1)
            assert stage.budget.held == 0
            await stream.send(b"GET /v1/health HTTP/1.1\r\n\r\n")
            assert b"HTTP/1.1 200 OK" in await stream.receive()
        async with await stage.connect() as stream:
            await stream.send(request)
            await stream.receive()
        await anyio.sleep(0.1)
        assert stage.budget.held == 0
        async with await stage.connect() as stream:
            await stream.send(request)
            await anyio.sleep(timeouts.ANSWER_S + 2 * http_connection.CHECK_INTERVAL_S)
            assert stage.budget.held == 0

    on_stage(main, 100 * MIB)


def test_a_file_counts_at_its_actual_size() -> None:
    async def main(stage: Stage) -> None:
        for name, size in (("little", 1000), ("large", 12 * MIB)):
            path = f"/v1/sandboxes/a/files?path=/workspace/{name}"
            assert (await stage.client.put(path, content=b"x" * size)).status_code == 200
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(stage.exec, output_bytes=16 * MIB), "sleep", "8")
            await anyio.sleep(1)
            assert (await stage.client.get("/v1/sandboxes/a/files?path=/workspace/little")).content == b"x" * 1000
            assert clock.now() < 2
            assert len((await stage.client.get("/v1/sandboxes/a/files?path=/workspace/large")).content) == 12 * MIB
            assert 8 <= clock.now() < 9

    on_stage(main, 64 * MIB)


def test_a_large_answer_of_a_read_only_call_is_refused_without_memory() -> None:
    async def main(stage: Stage) -> None:
        task = {"env_id": "Count-v0", "seed": 1, "options": {"padding": "x" * 900_000}}
        assert (await stage.client.put("/v1/sessions/s", json=task)).status_code == 200
        complete = await stage.client.get("/v1/sessions")
        assert len(complete.content) > 900_000
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(stage.exec, output_bytes=4 * MIB), "sleep", "5")
            await anyio.sleep(1)
            refused = await stage.client.get("/v1/sessions")
            assert (refused.status_code, refused.json()["type"]) == (503, "no_capacity")
            assert clock.now() < 2
        assert (await stage.client.get("/v1/sessions")).content[:500] == complete.content[:500]

    on_stage(main, 8 * MIB + 500_000)


def test_programs_of_a_list_wait_for_each_other_if_memory_is_short() -> None:
    async def main(stage: Stage) -> None:
        program: dict[str, Any] = {"sandbox_id": "a", "timeout_s": 100, "max_output_bytes": 4 * MIB}
        programs = [{**program, "argv": ["sleep", "20"]}] * 4 + [{**program, "argv": ["say", "100000", "y"]}] * 4
        answers = (await stage.client.post("/v1/sandboxes:exec", json=programs)).json()
        assert [answer["result"]["exit_code"] for answer in answers] == [0] * 8
        assert 40 <= clock.now() < 41

    on_stage(main, 40 * MIB)


def test_a_call_with_an_idempotency_key_keeps_its_memory_after_a_disconnect() -> None:
    async def main(stage: Stage) -> None:
        with anyio.move_on_after(1):
            await stage.exec("sleep", "5", output_bytes=4 * MIB, headers={"Idempotency-Key": "k"})
        await anyio.sleep(1)
        assert stage.budget.held == 8 * MIB
        answer = await stage.exec("sleep", "5", output_bytes=4 * MIB, headers={"Idempotency-Key": "k"})
        assert answer.json()["exit_code"] == 0
        assert clock.now() == pytest.approx(5, abs=0.3)

    on_stage(main, 10 * MIB)


def test_outputs_full_of_control_characters_do_not_grow_when_encoded() -> None:
    async def main(stage: Stage) -> None:
        answer = await stage.exec("say", "1000000", "\x07")
        assert set(answer.json()["stdout"]) == {"base64"}
        assert len(answer.content) < 1_500_000
        assert (await stage.exec("say", "100", "\x07")).json()["stdout"] == "\x07" * 100
        assert (await stage.exec("say", "100000", "\r\n\t")).json()["stdout"] == "\r\n\t" * 100_000

    on_stage(main, 10 * MIB)
