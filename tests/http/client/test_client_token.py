"""Sources and uses of a client's token."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import anyio
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

import envkit
from envkit import clock
from envkit.errors import ConfigError, EnvkitError, ForbiddenError, UnauthorizedError, UnreachableError, UsageError
from envkit.http.client.env_client import EnvClient
from tests.http.guarded import Stage, on_stage

ANSWER = b'{"id":1,"result":{"ready":true,"capacity":1,"leased":0}}'


@asynccontextmanager
async def listening(
    before: Callable[[ServerConnection, Request], Response | None],
) -> AsyncIterator[str]:
    """Run a server that passes each handshake to `before` and answers the first call of a client."""

    async def answer(connection: ServerConnection) -> None:
        async for _ in connection:
            await connection.send(ANSWER)

    async with serve(answer, "127.0.0.1", 0, process_request=before) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        with anyio.fail_after(20):
            yield f"http://127.0.0.1:{port}"


def shown(connect: Callable[[str], Awaitable[None]]) -> list[str | None]:
    """Return the ``Authorization`` headers that a server receives while `connect` runs."""
    seen: list[str | None] = []

    def record(connection: ServerConnection, request: Request) -> None:
        seen.append(request.headers.get("Authorization"))

    async def main() -> None:
        async with listening(record) as address:
            await connect(address)

    clock.run(main)
    return seen


def test_the_token_is_sent_in_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    async def given(address: str) -> None:
        async with EnvClient(address, token="ek_given"):
            pass

    async def by_variable(address: str) -> None:
        async with EnvClient(address):
            pass

    monkeypatch.delenv("ENVKIT_TOKEN", raising=False)
    assert shown(by_variable) == [None]
    monkeypatch.setenv("ENVKIT_TOKEN", "ek_variable")
    assert shown(by_variable) == ["Bearer ek_variable"]
    assert shown(given) == ["Bearer ek_given"]


def test_a_client_over_its_own_socket_sends_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def by_socket(address: str) -> None:
        async def connect() -> socket.socket:
            connected = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
            connected.setblocking(False)
            return connected

        async with EnvClient(connect=connect):
            pass
        with pytest.raises(UsageError, match="need url"):
            EnvClient(connect=connect, token="ek_x")

    monkeypatch.setenv("ENVKIT_TOKEN", "ek_variable")
    assert shown(by_socket) == [None]


@pytest.mark.parametrize("token", ["a b", "a\nX-Other: 1", "é", "\x7f"])
def test_an_invalid_token_is_rejected_before_it_is_sent(token: str) -> None:
    with pytest.raises(UsageError, match="invalid token"):
        EnvClient("http://127.0.0.1:1", token=token)


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (401, '{"type":"unauthorized","fields":{"detail":"who?"}}', UnauthorizedError, ": who?"),
        (403, '{"type":"forbidden","fields":{"detail":"not you"}}', ForbiddenError, ": not you"),
        (401, "<html>", UnauthorizedError, "status 401: it requires authentication"),
        (403, "<html>", UnreachableError, "status 403; check that an envkit server runs there"),
        (500, "[]", UnreachableError, "status 500; check that an envkit server runs there"),
    ],
)
def test_a_rejected_handshake_raises_the_error_of_the_server(
    status: int, body: str, error: type[EnvkitError], message: str
) -> None:
    def refuse(connection: ServerConnection, request: Request) -> Response:
        return connection.respond(status, body)

    async def main() -> None:
        async with listening(refuse) as address:
            with pytest.raises(error, match=message):
                async with EnvClient(address):
                    pass

    clock.run(main)


def test_make_accepts_a_token_and_fails_with_a_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(stage: Stage) -> None:
        def made(token: str | None) -> object:
            with closing(envkit.make("Count-v0", url=stage.address, token=token)) as env:
                return env.reset(seed=3)[0]

        monkeypatch.delenv("ENVKIT_TOKEN", raising=False)
        assert await clock.to_thread(partial(made, stage.token())) == "seed 3"
        for wrong in ("ek_wrong", None):
            with pytest.raises(UnauthorizedError):
                await clock.to_thread(partial(made, wrong))
        monkeypatch.setenv("ENVKIT_TOKEN", stage.token())
        assert await clock.to_thread(partial(made, None)) == "seed 3"

    on_stage(main, tmp_path)


def test_a_token_for_a_local_environment_is_rejected() -> None:
    with pytest.raises(ConfigError, match="url: not set"):
        envkit.make("FrozenLake-v0", token="ek_x")
    with pytest.raises(ConfigError, match="url: not set"):
        envkit.make_vec("FrozenLake-v0", 2, token="ek_x")
