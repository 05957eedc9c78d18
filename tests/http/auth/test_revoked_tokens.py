"""Requests, sockets and streams whose token is revoked."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from websockets.exceptions import ConnectionClosed

from envkit.errors import UnauthorizedError
from envkit.http.client.env_client import EnvClient
from tests.http.guarded import Stage, on_stage, open_socket


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


def test_a_revoked_token_closes_an_idle_socket(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        async with await open_socket(stage, {"Authorization": f"Bearer {token}"}) as socket:
            stage.tokens.revoke(token.split("_")[1])
            with anyio.fail_after(10), pytest.raises(ConnectionClosed, match="the token was revoked"):
                await socket.recv()

    on_stage(main, tmp_path)
