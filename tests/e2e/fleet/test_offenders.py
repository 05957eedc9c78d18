"""An environment that kills its sandboxes: it costs its own tenant's episodes, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.errors import EnvRejectedError, SandboxLostError
from envkit.http.client.env_client import EnvClient
from envkit.types import Task
from envkit.wiring.gateway.token_store import open_tokens
from tests.e2e.fleet.fleet import Gateway, install_environment, run, serving

pytestmark = [pytest.mark.bwrap, pytest.mark.xdist_group("offenders")]

NASTY = """
import os
import gymnasium
from envkit.registry import register
from envkit.spaces import Utf8Text

class Nasty(gymnasium.Env):
    observation_space = action_space = Utf8Text(max_length=64)

    def reset(self, *, seed=None, options=None):
        os._exit(3)

def register_all():
    register("Nasty-v0", "nasty_env:Nasty")
"""
POISONS = 9
INNOCENT = 4


def test_episodes_of_other_tenants_survive_and_the_guilty_environment_is_rejected(tmp_path: Path) -> None:
    async def main(gateway: Gateway) -> None:
        outcomes: list[str] = []
        have_started, is_over = anyio.Event(), anyio.Event()
        waits: list[float] = []

        async def play(number: int) -> None:
            """Play one episode of tenant b until the poison has ended."""
            async with bob.lease(Task("FrozenLake-v0", number, {"max_moves": 10_000})) as episode:
                await episode.reset()
                started.append(number)
                if len(started) == INNOCENT:
                    have_started.set()
                while not is_over.is_set():
                    step = await episode.step("nothing")
                    assert not step.terminated
                    assert not step.truncated
                    await anyio.sleep(0.05)
            survived.append(number)

        started: list[int] = []
        survived: list[int] = []
        async with (
            EnvClient(gateway.url, token=tokens["a"]) as ann,
            EnvClient(gateway.url, token=tokens["b"]) as bob,
            EnvClient(gateway.url, token=tokens["c"]) as carl,
            anyio.create_task_group() as tasks,
        ):
            for number in range(INNOCENT):
                tasks.start_soon(play, number)
            await have_started.wait()
            for number in range(POISONS):
                try:
                    async with ann.lease(Task("Nasty-v0", number)) as episode:
                        await episode.reset()
                except (SandboxLostError, EnvRejectedError) as error:
                    outcomes.append(type(error).__name__)
                    last = error
                began = clock.now()
                async with carl.lease(Task("FrozenLake-v0", 1)) as episode:
                    await episode.reset()
                    await episode.step("Left")
                waits.append(clock.now() - began)
            is_over.set()
        assert outcomes == ["SandboxLostError"] * 5 + ["EnvRejectedError"] * (POISONS - 5)
        assert isinstance(last, EnvRejectedError)
        assert last.env_id == "Nasty-v0"
        assert len(survived) == INNOCENT
        assert max(waits) < 30

    store = open_tokens(tmp_path)
    tokens = {tenant: store.create(tenant, ["play"]) for tenant in "abc"}
    install_environment(tmp_path / "site-packages", "nasty_env", NASTY)
    settings = ("envs.sandboxes=2", "envs.warm=1", "restarts.budget=2")
    with serving("local", tmp_path, *settings, environments=tmp_path / "site-packages") as gateway:
        run(lambda: main(gateway), 120)
