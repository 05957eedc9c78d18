"""WebShop on a real server: many sessions share one sandbox and its catalogue, and a killed sandbox changes no page."""

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

SESSIONS = 64
ONE_SANDBOX = ("envs.sandboxes=1", "envs.warm=1", "restarts.budget=20", "restarts.window_s=0.5")


def task(seed: int) -> Task:
    return Task("WebShop-v0", seed, {"catalogue": "webshop-1k"})


def pages(seed: int) -> list[str]:
    """Return the pages of an episode in this process that always takes the last legal move, but never buys."""
    env = environments.make("WebShop-v0", catalogue="webshop-1k")
    text, info = env.reset(seed=seed)
    shown = [text]
    for _ in range(4):
        text, *_, info = env.step(next(move for move in reversed(info["legal_moves"]) if move != "click[buy now]"))
        shown.append(text)
    return shown


@pytest.mark.parametrize("kind", [LOCAL, DOCKER])
def test_sessions_of_one_sandbox_show_the_pages_of_their_own_seeds_even_if_it_is_killed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVKIT_CACHE", str(tmp_path / "cache"))
    assert data.build("webshop-1k", lambda line: None)
    expected = [pages(seed) for seed in range(SESSIONS)]
    found: dict[int, list[str]] = {}
    begun, killed = anyio.Semaphore(0), anyio.Event()

    async def play(client: EnvClient, seed: int) -> None:
        async with client.lease(task(seed)) as episode:
            start = await episode.reset()
            observation, found[seed] = start.observation, [start.observation.text]
            for turn in range(4):
                if turn == 2:
                    begun.release()
                    await killed.wait()
                moves = [move for move in observation.legal_moves if move != "click[buy now]"]
                observation = (await episode.step(moves[-1])).observation
                found[seed].append(observation.text)

    with serving(kind, tmp_path, *ONE_SANDBOX) as gateway:

        async def main() -> None:
            async with EnvClient(gateway.url) as client, anyio.create_task_group() as tasks:
                for seed in range(SESSIONS):
                    tasks.start_soon(play, client, seed)
                for _ in range(SESSIONS):
                    await begun.acquire()
                await gateway.wait_for_warm(1)
                (sandbox,) = (await gateway.env_sandboxes()).values()
                await gateway.kill_env_sandbox(sandbox)
                killed.set()

        run(main, 120)
    assert [found[seed] for seed in range(SESSIONS)] == expected
