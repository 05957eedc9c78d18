"""Sandboxes over a WebSocket, frame by frame, and their events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from websockets.asyncio.client import ClientConnection, connect

from envkit import clock
from envkit.sandbox.pool import Pool
from tests.http.envs import serving, slots
from tests.http.pools import pool_of
from tests.http.remote_sandboxes import scripted

A = "/v1/sandboxes/a"


def connected(address: str, token: str = "") -> connect:
    headers = {"Authorization": f"Bearer {token}"}
    return connect(f"{address.replace('http', 'ws')}/v1/ws", additional_headers=headers)


def by_frames(main: Callable[[ClientConnection, Pool], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with (
            scripted() as backend,
            slots() as host,
            pool_of(backend) as pool,
            serving(host, pool=pool, **settings) as address,
            connected(address) as socket,
        ):
            with anyio.fail_after(20):
                await main(socket, pool)

    clock.run(run)


async def send(socket: ClientConnection, *frames: tuple[int, str, dict[str, Any]]) -> None:
    await socket.send(json.dumps([{"id": id, "method": method, "params": params} for id, method, params in frames]))


async def receive(socket: ClientConnection, count: int) -> list[dict[str, Any]]:
    """Return `count` answers in order of arrival."""
    received: list[dict[str, Any]] = []
    while len(received) < count:
        message = json.loads(await socket.recv())
        received += message if isinstance(message, list) else [message]
    return received


def test_calls_run_concurrently_and_are_answered_as_they_finish() -> None:
    async def main(socket: ClientConnection, pool: Pool) -> None:
        await send(socket, (1, "sandbox.create", {"sandbox_id": "a"}))
        assert (await receive(socket, 1))[0]["result"]["state"] == "leased"
        a = {"sandbox_id": "a"}
        await send(
            socket,
            (2, "sandbox.exec", {**a, "argv": ["sleep", "0.4"], "timeout_s": 5}),
            (3, "sandbox.exec", {**a, "argv": ["sleep", "0.1"], "timeout_s": 5}),
            (4, "sandbox.write", {**a, "path": "one", "content": "/wA="}),
            (5, "sandbox.shell", {**a, "command": "echo hi", "timeout_s": 5}),
            (6, "sandbox.view", a),
            (7, "sandbox.list", {}),
        )
        answers = await receive(socket, 6)
        assert [one["id"] for one in answers][-2:] == [3, 2]
        by_id = {one["id"]: one["result"] for one in answers}
        assert (by_id[5]["stdout"], by_id[6]["sandbox_id"], len(by_id[7]["sandboxes"])) == ("echo hi", "a", 1)
        for method, params, result in (
            ("sandbox.read", {**a, "path": "one"}, {"content": "/wA="}),
            ("sandbox.stop", a, {"done": True}),
        ):
            await send(socket, (8, method, params))
            assert [one["result"] for one in await receive(socket, 1)] == [result]

    by_frames(main)


INVALID: list[tuple[str, dict[str, Any], str]] = [
    ("sandbox.exce", {}, "bad_request"),
    ("sandbox.exec", {"sandbox_id": "nobody", "argv": ["true"], "timeout_s": 1}, "sandbox_not_found"),
    ("sandbox.exec", {"sandbox_id": "a", "argv": [], "timeout_s": 1}, "bad_request"),
    ("sandbox.exec", {"sandbox_id": "a", "argv": ["x"], "timeout_s": 1, "stdin": "no base64"}, "bad_request"),
    ("sandbox.create", {"sandbox_id": "a b"}, "bad_request"),
    ("sandbox.create", {"sandbox_id": "b", "network": ["a host"]}, "bad_option"),
    ("sandbox.create", {"sandbox_id": "a", "pids": 5}, "sandbox_conflict"),
    ("sandbox.read", {"sandbox_id": "a", "path": "nothing"}, "missing_file"),
    ("sandbox.write", {"sandbox_id": "a", "path": "x", "content": "A" * (2 << 20)}, "too_large"),
    ("sandbox.cancel", {"sandbox_id": "a", "key": ""}, "bad_request"),
]


def test_an_invalid_call_is_rejected_and_keeps_the_socket_open() -> None:
    async def main(socket: ClientConnection, pool: Pool) -> None:
        await send(socket, (1, "sandbox.create", {"sandbox_id": "a"}))
        await receive(socket, 1)
        for method, params, code in INVALID:
            await send(socket, (2, method, params))
            assert (await receive(socket, 1))[0]["error"]["type"] == code, (method, params)
            await send(socket, (3, "sandbox.exec", {"sandbox_id": "a", "argv": ["echo"], "timeout_s": 5}))
            assert (await receive(socket, 1))[0]["result"]["stdout"] == "echo"

    by_frames(main)
