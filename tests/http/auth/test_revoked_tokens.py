"""Requests, sockets and streams whose token is revoked."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from envkit import clock
from envkit.errors import UnauthorizedError
from envkit.http.auth.tokens import FRESH_S, TokenStore
from envkit.http.client.env_client import EnvClient
from envkit.http.protocol.asgi import Message, Receive, Scope, Send
from envkit.http.server.middleware import AuthMiddleware
from envkit.http.server.server import serve
from tests.http.guarded import Stage, Stream, on_stage, open_socket


def test_a_revoked_token_ends_requests_and_open_sockets(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        async with EnvClient(stage.address, token=token) as client:
            await client.health()
            stage.tokens.revoke(token.split("_")[1])
            await anyio.sleep(0.1)
            assert (await stage.ask("GET", "/v1/envs", token)).status_code == 401
            for _ in range(2):
                with pytest.raises(UnauthorizedError, match="the token is not valid"):
                    await client.health()

    on_stage(main, tmp_path)


def test_a_stream_ends_when_its_token_is_revoked(tmp_path: Path) -> None:
    async def main() -> None:
        sent: list[Message] = []
        with TokenStore(tmp_path / "tokens.sqlite", fresh_s=0) as tokens:
            token = tokens.create("ops", ["admin"], "ops")

            async def send(message: Message) -> None:
                sent.append(message)
                if len(sent) == 5:
                    tokens.revoke("ops")

            async def receive() -> Message:
                raise AssertionError("a stream reads nothing")

            headers = [(b"authorization", f"Bearer {token}".encode())]
            scope: Scope = {"type": "http", "path": "/v1/events", "method": "GET", "headers": headers}
            await AuthMiddleware(Stream(), tokens)(scope, receive, send)
        assert [message.get("more_body", False) for message in sent] == [
            False,
            True,
            True,
            True,
            True,
        ]  # no end, so the connection is aborted

    clock.run(main)


def test_an_event_stream_with_a_revoked_token_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main(stage: Stage) -> None:
        follower, admin = stage.token("ops", "admin", name="follower"), stage.token("ops", "admin")
        headers = {"Authorization": f"Bearer {follower}"}
        async with stage.http.stream("GET", "/v1/events", headers=headers) as stream:
            assert stream.status_code == 200
            stage.tokens.revoke("follower")
            await anyio.sleep(0.1)
            await stage.ask("PUT", "/v1/sandboxes/a", admin, json={})
            with pytest.raises(httpx.RemoteProtocolError):
                await stream.aread()

    on_stage(main, tmp_path, has_sandboxes=True)
    assert caplog.messages == []


def test_an_aborted_stream_does_not_look_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Served(Stream):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await super().__call__(scope, receive, send)
                return
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})

    async def main() -> None:
        addresses: list[str] = []
        is_ready = anyio.Event()

        def on_ready(address: str) -> None:
            addresses.append(address)
            is_ready.set()

        with TokenStore(tmp_path / "tokens.sqlite", fresh_s=0.05) as tokens:
            headers = {"Authorization": f"Bearer {tokens.create('ops', ['admin'], 'ops')}"}
            async with anyio.create_task_group() as tasks:
                run = partial(serve, port=0, on_ready=on_ready, handle_signals=False, drain_s=1)
                tasks.start_soon(run, AuthMiddleware(Served(), tokens))
                await is_ready.wait()
                async with (
                    httpx.AsyncClient(base_url=addresses[0], trust_env=False) as client,
                    client.stream("GET", "/v1/events", headers=headers) as stream,
                ):
                    chunks = stream.aiter_raw()
                    await anext(chunks)
                    tokens.revoke("ops")
                    with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                        async for _ in chunks:
                            pass
                tasks.cancel_scope.cancel()

    clock.run(main)
    assert caplog.messages == []


def test_a_revoked_token_closes_an_idle_socket(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        async with await open_socket(stage, {"Authorization": f"Bearer {token}"}) as socket:
            stage.tokens.revoke(token.split("_")[1])
            with anyio.fail_after(10), pytest.raises(ConnectionClosed, match="the token was revoked"):
                await socket.recv()

    on_stage(main, tmp_path)


def test_a_revoked_token_closes_an_idle_socket_within_a_second_of_its_last_use(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        seconds = []
        for _ in range(3):  # on a busy machine the first may be late
            token = stage.token()
            headers = {"Authorization": f"Bearer {token}"}
            await stage.ask("GET", "/v1/envs", token)
            await anyio.sleep(0.5)
            async with await open_socket(stage, headers) as socket:
                await anyio.sleep(0.6)  # the cached token has expired and is checked again
                await stage.ask("GET", "/v1/envs", token)
                stage.tokens.revoke(token.split("_")[1])
                began = clock.now()
                with pytest.raises(ConnectionClosed, match="the token was revoked"):
                    await socket.recv()
                seconds.append(clock.now() - began)
            if seconds[-1] < 1:
                return
        pytest.fail(f"the sockets ended after {seconds} s")

    on_stage(main, tmp_path, fresh_s=FRESH_S)
