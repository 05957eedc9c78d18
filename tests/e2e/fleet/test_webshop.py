"""WebShop on a real server: sessions share one sandbox and its catalogue."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from envkit.http.client.env_client import EnvClient
from envkit.types import Task
from envkit.wiring import data, environments
from tests.e2e.fleet.fleet import DOCKER, LOCAL, run, serving

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes outlive a server")

SESSIONS = 8
MOVES = 2


def pages(seed: int) -> list[str]:
    """Return the pages of an episode in this process that always takes the last legal move."""
    env = environments.make("WebShop-v0", catalogue="webshop-1k")
    text, info = env.reset(seed=seed)
    shown = [text]
    for _ in range(MOVES):
        text, *_, info = env.step(info["legal_moves"][-1])
        shown.append(text)
    return shown


@pytest.mark.parametrize("kind", [LOCAL, DOCKER])
def test_sessions_of_one_sandbox_show_the_pages_of_their_own_seeds(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVKIT_CACHE", str(tmp_path / "cache"))
    assert data.build("webshop-1k", lambda line: None)
    found: dict[int, list[str]] = {}

    async def play(client: EnvClient, seed: int) -> None:
        async with client.lease(Task("WebShop-v0", seed, {"catalogue": "webshop-1k"})) as episode:
            observation = (await episode.reset()).observation
            found[seed] = [observation.text]
            for _ in range(MOVES):
                observation = (await episode.step(observation.legal_moves[-1])).observation
                found[seed].append(observation.text)

    with serving(kind, tmp_path, "envs.sandboxes=1", "envs.warm=0") as gateway:

        async def main() -> None:
            async with EnvClient(gateway.url) as client, anyio.create_task_group() as tasks:
                for seed in range(SESSIONS):
                    tasks.start_soon(play, client, seed)

        run(main, 120)
    assert found == {seed: pages(seed) for seed in range(SESSIONS)}
