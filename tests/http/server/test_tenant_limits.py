"""Limits per tenant: sockets and concurrent requests, on a real server."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from envkit.errors import RateLimitError
from envkit.http.client.env_client import EnvClient
from tests.http.guarded import Stage, on_stage


def test_the_number_of_sockets_is_limited_per_tenant(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme = stage.token("acme")
        async with EnvClient(stage.address, token=acme), EnvClient(stage.address, token=acme):
            with pytest.raises(RateLimitError, match="too many open sockets"):
                async with EnvClient(stage.address, token=acme):
                    pass
            async with EnvClient(stage.address, token=stage.token("umbrella")):
                pass
        while True:  # the server notices the close a moment later
            with suppress(RateLimitError):
                async with EnvClient(stage.address, token=acme):
                    return

    on_stage(main, tmp_path, max_sockets=2)


def test_the_number_of_concurrent_requests_is_limited_per_tenant(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, slow = stage.token(), {"env_id": "Sleeper-v0", "seed": 1}
        for name in ("a", "b"):
            await stage.ask("PUT", f"/v1/sessions/{name}", acme, json=slow)
        async with anyio.create_task_group() as tasks:

            async def step(name: str) -> None:
                path = f"/v1/sessions/{name}/step"
                answer = await stage.ask("POST", path, acme, json={"turn": 0, "action": "sleep 2"})
                assert answer.status_code == 200

            for name in ("a", "b"):
                tasks.start_soon(step, name)
            states: list[str] = []
            while states != ["stepping"] * 2:
                seen = (await stage.ask("GET", "/v1/sessions", stage.token("ops", "admin"))).json()["sessions"]
                states = [one["state"] for one in seen]
            refused = await stage.ask("GET", "/v1/envs", acme)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert (await stage.ask("GET", "/v1/envs", stage.token("umbrella"))).status_code == 200
        assert (await stage.ask("GET", "/v1/envs", acme)).status_code == 200

    on_stage(main, tmp_path, max_requests=2)
