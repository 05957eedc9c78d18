"""Limits per tenant: rate, sockets and concurrent requests, on a real server."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.errors import RateLimitError
from envkit.http.auth.rate_limit import Rate
from envkit.http.client.env_client import EnvClient
from tests.http.guarded import COUNT, LONG, Stage, on_stage


def test_requests_above_the_rate_limit_get_retry_after(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, same, umbrella = stage.token("acme"), stage.token("acme"), stage.token("umbrella")
        statuses = [(await stage.ask("GET", "/v1/envs", token)).status_code for token in (acme, same, acme, umbrella)]
        assert statuses == [200, 200, 200, 200]
        refused = await stage.ask("GET", "/v1/envs", same)
        assert (refused.status_code, refused.json()["type"], refused.json()["retry"]) == (429, "rate_limit", True)
        assert 9 <= int(refused.headers["retry-after"]) <= 10
        assert (await stage.ask("GET", "/v1/health")).status_code == 200

    on_stage(main, tmp_path, rate=Rate(per_s=0.1, burst=3))


def test_a_batch_counts_as_many_calls_as_it_has_steps(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        await stage.ask("PUT", "/v1/sessions/a", token, json=COUNT)
        batch = [{"session_id": "a", "turn": 0, "action": "x"}] * 8
        assert (await stage.ask("POST", "/v1/sessions:step", token, json=batch)).status_code == 200
        refused = await stage.ask("POST", "/v1/sessions:step", token, json=batch[:2])
        assert (refused.status_code, int(refused.headers["retry-after"]) > 5) == (429, True)

    on_stage(main, tmp_path, rate=Rate(per_s=0.1, burst=10))


def test_a_socket_above_the_rate_limit_is_slowed_and_not_refused(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        async with EnvClient(stage.address, token=stage.token()) as client, client.lease(LONG) as episode:
            await episode.reset()
            began = clock.now()
            for turn in range(40):
                assert (await episode.step("x")).observation.text == f"{turn + 1} x"
            assert 0.2 < clock.now() - began < 5

    on_stage(main, tmp_path, rate=Rate(per_s=100, burst=10))


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
