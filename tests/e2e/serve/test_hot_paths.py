"""The number of files that frequent requests pass through in the server, so that a reader can follow them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import httpx

from envkit import clock
from envkit.config.serving import ServeConfig
from envkit.http.api.app import create_app
from envkit.http.server.middleware import AuthMiddleware
from envkit.wiring.gateway.gateway import open_fleet
from tests.http.envs import listening

ROOT = Path(__file__).parents[3]
OURS = [ROOT / name for name in ("envkit", "environments", "sandbox", "trainer_bridge")]
CONFIG = {
    "backend": "process",
    "listen": {"port": 0},
    "envs": {"sandboxes": 1, "capacity": 2, "warm": 0},
    "node": {"max_sandboxes": 4},
}
STEP_FILES = 18
EXEC_FILES = 22


def test_a_step_and_an_exec_pass_through_few_files() -> None:
    found: dict[str, set[str]] = {}

    async def measured(name: str, request: Callable[[], httpx.Response]) -> None:
        await clock.to_thread(request)
        # Background tasks, such as heartbeats, may run during a measurement, but hardly during all of them.
        found[name] = min([await files_of(request) for _ in range(5)], key=len)

    async def files_of(request: Callable[[], httpx.Response]) -> set[str]:
        entered: set[str] = set()

        def note(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and frame.f_code is not clock.to_thread.__code__:
                entered.add(frame.f_code.co_filename)

        sys.setprofile(note)
        try:
            response = await clock.to_thread(request)
        finally:
            sys.setprofile(None)
        assert response.status_code == 200, response.text
        files = {Path(file).resolve() for file in entered}  # noqa: ASYNC240 (a test)
        return {str(file.relative_to(ROOT)) for file in files if any(file.is_relative_to(one) for one in OURS)}

    async def main(address: str) -> None:
        with httpx.Client(base_url=address, trust_env=False, timeout=30) as client:
            turns = iter(range(100))
            await clock.to_thread(partial(client.put, "/v1/sessions/a", json={"env_id": "FrozenLake-v0", "seed": 1}))
            await clock.to_thread(partial(client.put, "/v1/sandboxes/a", json={}))
            step = lambda: client.post("/v1/sessions/a/step", json={"turn": next(turns), "action": "nothing"})  # noqa: E731
            await measured("step", step)
            exec_ = partial(client.post, "/v1/sandboxes/a/exec", json={"argv": ["true"], "timeout_s": 9})
            await measured("exec", exec_)

    async def run() -> None:
        config = ServeConfig.model_validate(CONFIG)
        async with (
            open_fleet(config, lambda line: None) as fleet,
            listening(AuthMiddleware(create_app(fleet.host, pool=fleet.pool))) as address,
        ):
            await main(address)

    clock.run(run)
    assert len(found["step"]) <= STEP_FILES, sorted(found["step"])
    assert len(found["exec"]) <= EXEC_FILES, sorted(found["exec"])
