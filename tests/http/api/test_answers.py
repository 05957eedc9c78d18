"""How much of answers a server holds at once: what they may become has room before what they tell of is begun."""

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
from tests.http.boxes import scripted
from tests.http.envs import slots
from tests.http.pools import SmallPool

MIB = 1 << 20
Asked: TypeAlias = Callable[..., Awaitable[httpx.Response]]


class Stage:
    """A server with one sandbox, ``a``, which has room for as much as `bodies` say."""

    def __init__(self, address: str, bodies: MemoryBudget, client: httpx.AsyncClient) -> None:
        self.port = int(address.rpartition(":")[2])
        self.bodies = bodies
        self.client = client

    async def exec(self, *argv: str, keep: int = MIB, headers: dict[str, str] | None = None) -> httpx.Response:
        body = {"argv": argv, "timeout_s": 600, "max_output_bytes": keep}
        return await self.client.post("/v1/sandboxes/a/exec", json=body, headers=headers)

    async def said(self, outcomes: dict[str, tuple[float, int]], name: str, *argv: str, keep: int = MIB) -> None:
        """Note when which status came."""
        status = (await self.exec(*argv, keep=keep)).status_code
        outcomes[name] = round(clock.now(), 1), status

    async def connected(self) -> SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)


@asynccontextmanager
async def served(bodies: MemoryBudget, tokens: TokenStore | None = None) -> AsyncIterator[Stage]:
    addresses: list[str] = []
    is_ready = anyio.Event()

    def on_ready(address: str) -> None:
        addresses.append(address)
        is_ready.set()

    async with slots() as host, scripted() as backend, anyio.create_task_group() as tasks:
        app = create_app(host, pool=SmallPool(backend), trees=tar_stream)
        guard = AuthMiddleware(app, tokens, bodies=bodies)
        tasks.start_soon(partial(serve, guard, port=0, on_ready=on_ready, handle_signals=False, drain_s=1))
        await is_ready.wait()
        async with httpx.AsyncClient(base_url=addresses[0], trust_env=False, timeout=None) as client:
            if tokens is None:
                assert (await client.put("/v1/sandboxes/a", json={})).status_code == 200
            yield Stage(addresses[0], bodies, client)
        tasks.cancel_scope.cancel()


def on_stage(main: Callable[[Stage], Awaitable[None]], most: int) -> None:
    async def run() -> None:
        async with served(MemoryBudget(most)) as stage:
            await main(stage)
            await anyio.sleep(0.1)
            assert stage.bodies.held == 0

    clock.run(run, virtual=True)


def test_of_programs_as_many_run_at_once_as_there_is_room_for_what_they_may_say() -> None:
    async def main(stage: Stage) -> None:
        outcomes: dict[str, tuple[float, int]] = {}
        began = clock.now()
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(partial(stage.said, keep=4 * MIB), outcomes, f"first {number}", "sleep", "3")
            await anyio.sleep(1)
            assert stage.bodies.held == 40 * MIB
            tasks.start_soon(partial(stage.said, keep=4 * MIB), outcomes, "late", "sleep", "3")
        assert sorted(at - began for at, _ in outcomes.values()) == pytest.approx([3] * 5 + [6], abs=0.2)
        assert {status for _, status in outcomes.values()} == {200}

    on_stage(main, 80 * MIB)


def test_programs_that_may_say_little_run_by_the_dozen() -> None:
    async def main(stage: Stage) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(30):
                tasks.start_soon(stage.exec, "sleep", "3")
            await anyio.sleep(1)
            assert stage.bodies.held == 30 * 2 * MIB // 16
            answer = await stage.exec("say", str(MIB), "x")
            assert len(answer.json()["stdout"]) == MIB

    on_stage(main, 4 * MIB)


def test_an_answer_that_is_there_is_counted_as_it_is_though_less_was_expected() -> None:
    async def main() -> None:
        bodies = MemoryBudget(2 * MIB)
        room = bodies.reservation(EVERYBODY)
        await room.expect(MIB // 8)
        room.settle(3 * MIB)
        assert bodies.held == 3 * MIB
        with pytest.raises(CapacityError):
            await bodies.reservation(EVERYBODY).expect(MIB // 8, within_s=0)
        room.free()
        assert bodies.held == 0

    clock.run(main, virtual=True)


def test_who_finds_no_room_for_long_is_told_to_come_again_and_nothing_ran() -> None:
    async def main(stage: Stage) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(stage.exec, keep=4 * MIB), "sleep", "60")
            await anyio.sleep(1)
            refused = await stage.exec("count", keep=4 * MIB)
            assert (refused.status_code, refused.json()["type"]) == (503, "no_capacity")
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["content-type"] == "application/problem+json"
            assert clock.now() == pytest.approx(1 + WAIT_S, abs=0.5)
            assert (await stage.exec("echo", "hello", keep=1000)).json()["stdout"] == "echo hello"
            assert clock.now() == pytest.approx(1 + WAIT_S, abs=0.5)
        assert (await stage.exec("count", keep=4 * MIB)).json()["stdout"] == "1"

    on_stage(main, 10 * MIB)


def test_those_who_want_much_leave_half_to_those_who_want_little() -> None:
    async def main(stage: Stage) -> None:
        outcomes: dict[str, tuple[float, int]] = {}
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(partial(stage.said, keep=8 * MIB), outcomes, f"much {number}", "sleep", "5")
            await anyio.sleep(1)
            assert stage.bodies.held == 32 * MIB
            await stage.said(outcomes, "little", "echo")
            assert clock.now() < 2
        assert sorted(round(at) for at, _ in outcomes.values()) == [1, 5, 5, 10]

    on_stage(main, 64 * MIB)


def test_an_answer_is_held_until_it_is_read_and_no_longer_or_more_than_it_has() -> None:
    body = json.dumps({"argv": ["say", str(12 * MIB), "x"], "timeout_s": 60, "max_output_bytes": 20 * MIB}).encode()
    request = b"POST /v1/sandboxes/a/exec HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def main(stage: Stage) -> None:
        async with await stage.connected() as link:
            await link.send(request)
            count = len(await link.receive())
            await anyio.sleep(20)
            assert 12 * MIB < stage.bodies.held < 13 * MIB
            while count < 12 * MIB:
                count += len(await link.receive())
            await anyio.sleep(0.1)
            assert stage.bodies.held == 0
            await link.send(b"GET /v1/health HTTP/1.1\r\n\r\n")
            assert b"HTTP/1.1 200 OK" in await link.receive()
        async with await stage.connected() as link:
            await link.send(request)
            await link.receive()
        await anyio.sleep(0.1)
        assert stage.bodies.held == 0
        async with await stage.connected() as link:
            await link.send(request)
            await anyio.sleep(timeouts.ANSWER_S + 2 * http_connection.CHECK_INTERVAL_S)
            assert stage.bodies.held == 0

    on_stage(main, 100 * MIB)


def test_a_file_takes_what_it_has_and_not_what_it_might_have() -> None:
    async def main(stage: Stage) -> None:
        for name, size in (("little", 1000), ("large", 12 * MIB)):
            path = f"/v1/sandboxes/a/files?path=/workspace/{name}"
            assert (await stage.client.put(path, content=b"x" * size)).status_code == 200
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(stage.exec, keep=16 * MIB), "sleep", "8")
            await anyio.sleep(1)
            assert (await stage.client.get("/v1/sandboxes/a/files?path=/workspace/little")).content == b"x" * 1000
            assert clock.now() < 2
            assert len((await stage.client.get("/v1/sandboxes/a/files?path=/workspace/large")).content) == 12 * MIB
            assert 8 <= clock.now() < 9

    on_stage(main, 64 * MIB)


def test_what_only_tells_how_things_are_is_refused_where_there_is_no_room_for_it() -> None:
    async def main(stage: Stage) -> None:
        task = {"env_id": "Count-v0", "seed": 1, "options": {"padding": "x" * 900_000}}
        assert (await stage.client.put("/v1/sessions/s", json=task)).status_code == 200
        whole = await stage.client.get("/v1/sessions")
        assert len(whole.content) > 900_000
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(stage.exec, keep=4 * MIB), "sleep", "5")
            await anyio.sleep(1)
            refused = await stage.client.get("/v1/sessions")
            assert (refused.status_code, refused.json()["type"]) == (503, "no_capacity")
            assert clock.now() < 2
        assert (await stage.client.get("/v1/sessions")).content[:500] == whole.content[:500]

    on_stage(main, 8 * MIB + 500_000)


def test_a_list_of_programs_takes_turns_where_there_is_not_room_for_all() -> None:
    async def main(stage: Stage) -> None:
        program: dict[str, Any] = {"sandbox_id": "a", "timeout_s": 100, "max_output_bytes": 4 * MIB}
        programs = [{**program, "argv": ["sleep", "20"]}] * 4 + [{**program, "argv": ["say", "100000", "y"]}] * 4
        answers = (await stage.client.post("/v1/sandboxes:exec", json=programs)).json()
        assert [answer["result"]["exit_code"] for answer in answers] == [0] * 8
        assert 40 <= clock.now() < 41

    on_stage(main, 40 * MIB)


def test_a_call_with_a_key_keeps_its_room_until_it_is_done_whoever_leaves() -> None:
    async def main(stage: Stage) -> None:
        with anyio.move_on_after(1):
            await stage.exec("sleep", "5", keep=4 * MIB, headers={"Idempotency-Key": "k"})
        await anyio.sleep(1)
        assert stage.bodies.held == 8 * MIB
        answer = await stage.exec("sleep", "5", keep=4 * MIB, headers={"Idempotency-Key": "k"})
        assert answer.json()["exit_code"] == 0
        assert clock.now() == pytest.approx(5, abs=0.3)

    on_stage(main, 10 * MIB)


def test_outputs_full_of_control_characters_do_not_grow_on_their_way() -> None:
    async def main(stage: Stage) -> None:
        answer = await stage.exec("say", "1000000", "\x07")
        assert set(answer.json()["stdout"]) == {"base64"}
        assert len(answer.content) < 1_500_000
        assert (await stage.exec("say", "100", "\x07")).json()["stdout"] == "\x07" * 100
        assert (await stage.exec("say", "100000", "\r\n\t")).json()["stdout"] == "\r\n\t" * 100_000

    on_stage(main, 10 * MIB)
