"""Training on an `envkit serve`: the same episodes as in sandboxes of its own, whatever happens to the server."""

from __future__ import annotations

import json
import signal
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import envkit
from envkit import clock
from envkit.errors import EnvkitError
from envkit.http.client.env_client import EnvClient
from envkit.types import Task
from tests.e2e.fleet.fleet import Gateway, free_port, install_environment, serving
from tests.trainer_bridge.models import write_chat

pytestmark = pytest.mark.xdist_group("training")

PATIENCE_S = 300
"""After which a run hangs; on a machine where much else runs, training takes many times as long."""
STEPS, EPISODES = 3, 8
ONE_SANDBOX = ("envs.sandboxes=1", "envs.warm=0")

SMALL: dict[str, Any] = {
    "seed": 3,
    "env": {"id": "FrozenLake-v0", "num_envs": 16, "options": {"size": 3}},
    "engine": {"hidden_size": 16, "layers": 1},
    "rollout": {"group_size": 4, "max_turns": 10, "max_tokens": 256},
    "trainer": {"steps": STEPS, "groups_per_step": 2}, "threads": 1,
    "evaluation": {"episodes": 8},
    "imitation": {"states": 50, "updates": 2, "batch": 16, "check_episodes": 0},
    "tracking": {"trajectories_every": 1, "to": []},
}  # fmt: skip


def served(url: str, **env: Any) -> dict[str, Any]:
    """Return the training file for a server."""
    return {**SMALL, "env": {**SMALL["env"], "url": url, **env}}


def played(folder: Path) -> list[tuple[Any, ...]]:
    """Return token ids, rewards, success and end of all training episodes of a run."""
    return [
        (
            [(turn["generation"]["prompt_ids"], turn["generation"]["completion_ids"]) for turn in episode["turns"]],
            [turn["reward"] for turn in episode["turns"]],
            episode["outcome"]["success"],
            episode["outcome"]["stop"],
        )
        for step in range(1, STEPS + 1)
        for episode in map(json.loads, (folder / f"trajectories/step-{step}.jsonl").read_text().splitlines())
    ]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics, without times and memory."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.endswith(("_s", "_mib"))} for line in lines
    ]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in its own sandbox."""
    folder = tmp_path_factory.mktemp("runs") / "own"
    envkit.train({**SMALL, "sandbox": {"kind": "process"}}, output=folder)
    return folder


def test_a_run_on_a_server_plays_the_episodes_of_a_run_in_its_own_sandbox(own: Path, tmp_path: Path) -> None:
    with serving("process", tmp_path, "envs.sandboxes=2", "envs.warm=0") as gateway:
        summary = envkit.train(served(gateway.url), output=tmp_path / "run")

    assert (summary.train_steps, summary.episodes, summary.lost_episodes) == (STEPS, STEPS * EPISODES, 0)
    assert len(played(own)) == STEPS * 8
    assert played(tmp_path / "run") == played(own)
    assert metrics(tmp_path / "run") == metrics(own)


def test_a_server_that_is_killed_and_restarted_loses_no_episode_of_the_plan(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()

    async def until_it_plays_train_step_2(gateway: Gateway) -> None:
        rows = tmp_path / "run/metrics.jsonl"
        async with EnvClient(gateway.url) as client:
            while not (rows.exists() and rows.stat().st_size and (await client.ready()).leased):  # noqa: ASYNC110
                await anyio.sleep(0.01)

    async def main() -> envkit.TrainSummary:
        summary: list[envkit.TrainSummary] = []

        async def train(url: str) -> None:
            run = partial(envkit.train, served(url), output=tmp_path / "run")
            summary.append(await clock.to_thread(run))

        async with anyio.create_task_group() as tasks:
            with serving("process", tmp_path, *ONE_SANDBOX, port=port) as gateway:
                tasks.start_soon(train, gateway.url)
                await until_it_plays_train_step_2(gateway)
                await gateway.end(signal.SIGKILL)
            await anyio.sleep(2)
            with serving("process", tmp_path, *ONE_SANDBOX, port=port):
                while not summary:  # noqa: ASYNC110
                    await anyio.sleep(0.1)
        return summary[0]

    async def bounded() -> envkit.TrainSummary:
        with anyio.fail_after(PATIENCE_S):
            return await main()

    summary = clock.run(bounded)

    assert played(tmp_path / "run") == played(own)
    assert summary.episodes - summary.lost_episodes == STEPS * EPISODES
    assert capsys.readouterr().out.count("; waiting up to 120 s for the server\n") == 1


def test_a_full_server_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def main(url: str) -> None:
        content = {**served(url), "trainer": {"steps": 0}}
        async with EnvClient(url) as other, AsyncExitStack() as leases:
            for _ in range(EPISODES - 3):
                await leases.enter_async_context(other.lease(Task("FrozenLake-v0", 1)))
            async with AsyncExitStack() as last_leases, anyio.create_task_group() as tasks:
                for _ in range(3):
                    await last_leases.enter_async_context(other.lease(Task("FrozenLake-v0", 1)))
                tasks.start_soon(partial(clock.to_thread, partial(envkit.train, content, output=tmp_path / "run")))
                printed = ""
                try:
                    with anyio.fail_after(PATIENCE_S):
                        while " is full; 8 episodes wait for a slot\n" not in printed:  # those of the evaluation
                            await anyio.sleep(0.1)
                            printed += capsys.readouterr().out
                finally:
                    await last_leases.aclose()  # the run goes on with three slots

    with serving("process", tmp_path, *ONE_SANDBOX, f"envs.capacity={EPISODES}") as gateway:
        clock.run(main, gateway.url)

    assert json.loads((tmp_path / "run/summary.json").read_text())["eval_episodes"] == 8


def test_a_run_whose_server_does_not_return_saves_a_checkpoint_and_continues_on_another_server(
    own: Path, tmp_path: Path
) -> None:
    with serving("process", tmp_path, *ONE_SANDBOX) as gateway:

        def kill(step: int, values: object) -> None:
            if step == 2:
                gateway.process.kill()

        with pytest.raises(EnvkitError, match=r"^env.url: lost the server for 1 s: .* with --resume$"):
            envkit.train(served(gateway.url, outage_timeout_s=1), output=tmp_path / "run", on_step=kill)
    assert (tmp_path / "run/checkpoints/step-2").exists()
    with serving("process", tmp_path, *ONE_SANDBOX) as gateway:
        envkit.train(served(gateway.url), output=tmp_path / "run", resume=True)
    assert played(tmp_path / "run") == played(own)


ECHO = """
import gymnasium
import envkit
from envkit.spaces import Utf8Text

class Echo(gymnasium.Env):
    observation_space = action_space = Utf8Text(100)
    reset = lambda self, *, seed=None, options=None: (f"say {seed}", {})
    step = lambda self, action: (action[:20], float(len(action) % 2), True, False, {})

def register_all():
    envkit.register("Echo-v0", "echo:Echo")
"""


def test_an_environment_that_only_the_server_has_trains_a_model_without_imitation(tmp_path: Path) -> None:
    install_environment(tmp_path / "site-packages", "echo", ECHO)
    model = write_chat(tmp_path / "model", seed=5)
    with serving("process", tmp_path, *ONE_SANDBOX, environments=tmp_path / "site-packages") as gateway:
        config = {
            "env": {"id": "Echo-v0", "url": gateway.url},
            "engine": {"model": str(model), "device": "cpu"},
            "rollout": {"group_size": 2, "max_tokens": 200, "turn_tokens": 4},
            "trainer": {"steps": 1, "groups_per_step": 2},
            "threads": 1,
            "evaluation": {"episodes": 2},
        }
        summary = envkit.train(config, output=tmp_path / "run")
    assert (summary.train_steps, summary.episodes, summary.eval_episodes) == (1, 4, 2)
