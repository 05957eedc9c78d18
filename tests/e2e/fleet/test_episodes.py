"""Episodes of a real gateway whose sandboxes are killed or hang continue in another one."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

import envkit
from envkit import clock
from envkit.errors import SandboxLostError
from envkit.http.client.env_client import EnvClient
from envkit.protocols import Episode
from envkit.types import Observation, Reset, Step, Task
from envkit.wiring import environments
from tests.e2e.campaign import accounted_for, answers, moves_of, played, reported_rebuilds, without_news
from tests.e2e.fleet.fleet import DOCKER, LOCAL, Gateway, install_environment, run, serving

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes outlive a server")

both = pytest.mark.parametrize("kind", [LOCAL, DOCKER])
ONE_SANDBOX = ("envs.sandboxes=1", "envs.warm=1", "restarts.budget=20", "restarts.window_s=0.5")
"""One sandbox and a warm one; the restart budget does not delay replacements."""

KILLS = {"local": 3, "docker": 2}
REPLACED_S = {"local": 0.5, "docker": 3.0}
"""Promised seconds until a step is answered after its sandbox was killed, with a warm sandbox."""
HUNG_S = 5.0
"""Promised seconds until a sandbox with a hanging env server is given up."""
REBUILD_S = 3.0
BUSY = 10.0
"""Factor on the promised times on a busy machine."""

MINE = "Mine-v0"
MINE_ENV = """
import os
from envkit.env import AsyncEnv
from envkit.registry import register
from envkit.types import Observation, Reset, Step

class Mine(AsyncEnv):
    async def reset(self, *, seed, options):
        self.words = [str(seed)]
        return Reset(Observation("nothing"), {})

    async def step(self, action):
        if action == "boom":
            os._exit(1)
        self.words.append(action)
        return Step(Observation(" ".join(self.words)), float(len(self.words)), False, False, {})

    async def close(self):
        pass

def register_all():
    register("Mine-v0", "mine_env:Mine")
"""
CULPRIT = 7
OTHERS = 20


def without_info(start: Reset, steps: Sequence[Step]) -> list[object]:
    return [start.observation, *(replace(step, info={}) for step in steps)]


@both
def test_an_episode_of_a_killed_sandbox_continues_in_a_warm_one_soon(kind: str, tmp_path: Path) -> None:
    async def main(gateway: Gateway) -> None:
        task = Task("Sokoban-v0", 3)
        moves = moves_of(task, 12)
        async with environments.slots(1) as here:
            undisturbed = await answers(here, task, moves)
        seconds: list[float] = []
        async with EnvClient(gateway.url) as client:
            for _ in range(KILLS[kind]):
                await gateway.wait_for_warm(1)
                async with client.lease(task) as episode:
                    start, steps = await episode.reset(), await played(episode, moves[:6])
                    (sandbox_id,) = (await gateway.env_sandboxes()).values()
                    began = clock.now()
                    await gateway.kill_env_sandbox(sandbox_id)
                    steps += await played(episode, moves[6:7])
                    seconds.append(clock.now() - began)
                    steps += await played(episode, moves[7:])
                assert reported_rebuilds(steps[6:7]) == reported_rebuilds(steps) == ["killed by signal 9 (SIGKILL)"]
                assert without_info(start, steps) == without_info(*undisturbed)
        metrics = await gateway.metrics()
        assert metrics["envkit_env_sandboxes_lost_total"] == metrics["envkit_episodes_rebuilt_total"] == KILLS[kind]
        assert metrics["envkit_episodes_void_total"] == 0
        assert statistics.median(seconds) < BUSY * REPLACED_S[kind]

    with serving(kind, tmp_path, *ONE_SANDBOX) as gateway:
        run(lambda: main(gateway), 180)


@pytest.mark.parametrize("kind", [LOCAL, pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.alone])])
def test_episodes_of_a_hanging_env_server_continue_elsewhere_soon(kind: str, tmp_path: Path) -> None:
    async def main(gateway: Gateway) -> None:
        tasks = [Task("Sokoban-v0", 3), Task("FrozenLake-v0", 4)]
        seconds: list[float] = []
        async with environments.slots(2) as here, EnvClient(gateway.url) as client:
            await gateway.wait_for_warm(1)
            async with client.lease(tasks[0]) as one, client.lease(tasks[1]) as two:

                async def play_on(task: Task, episode: Episode) -> None:
                    """Continue in a sandbox that hangs from now on."""
                    moves = moves_of(task, 5)
                    undisturbed = await answers(here, task, moves)
                    began = clock.now()
                    steps = before[task.seed][1] + await played(episode, moves[2:])
                    seconds.append(clock.now() - began)
                    assert (
                        reported_rebuilds(steps[2:3])
                        == reported_rebuilds(steps)
                        == ["env server did not answer for 4 s"]
                    )
                    assert without_info(before[task.seed][0], steps) == without_info(*undisturbed)

                before: dict[int, tuple[Reset, list[Step]]] = {}
                for task, episode in zip(tasks, (one, two), strict=True):
                    before[task.seed] = await episode.reset(), await played(episode, moves_of(task, 2))
                (sandbox_id,) = (await gateway.env_sandboxes()).values()
                os.kill(gateway.env_server(sandbox_id), signal.SIGSTOP)
                async with anyio.create_task_group() as group:
                    for task, episode in zip(tasks, (one, two), strict=True):
                        group.start_soon(play_on, task, episode)
        assert max(seconds) < HUNG_S + BUSY * REBUILD_S

    with serving(kind, tmp_path, *ONE_SANDBOX) as gateway:
        run(lambda: main(gateway), 120)


@pytest.mark.parametrize("kind", [LOCAL])
def test_an_episode_that_kills_two_sandboxes_is_void_and_twenty_others_continue(kind: str, tmp_path: Path) -> None:
    async def main(gateway: Gateway) -> None:
        received: dict[int, list[Step]] = {seed: [] for seed in range(OTHERS + 1)}
        void: dict[int, str] = {}
        last_turn = 3

        async def play(episode: Episode, seed: int, turn: int) -> None:
            try:
                received[seed].append(await episode.step("boom" if (seed, turn) == (CULPRIT, 2) else f"move {turn}"))
            except SandboxLostError as loss:
                void[seed] = str(loss.cause)

        async with EnvClient(gateway.url) as client, AsyncExitStack() as leases:
            episodes = {seed: await leases.enter_async_context(client.lease(Task(MINE, seed, {}))) for seed in received}
            for episode in episodes.values():
                await episode.reset()
            for turn in range(last_turn + 1):
                async with anyio.create_task_group() as tasks:
                    for seed in received.keys() - void.keys():
                        tasks.start_soon(play, episodes[seed], seed, turn)
        cause = "exited with code 1"
        assert void == {CULPRIT: f"{cause}; the previous worker was lost during the same step"}
        for seed, steps in received.items():
            count = 2 if seed == CULPRIT else last_turn + 1
            texts = [" ".join([str(seed), *(f"move {turn}" for turn in range(end))]) for end in range(1, count + 1)]
            unharmed = [Step(Observation(text), float(n), False, False, {}) for n, text in enumerate(texts, 2)]
            assert [without_news(step) for step in steps] == unharmed
            assert set(reported_rebuilds(steps)) <= {cause}
        metrics = await gateway.metrics()
        assert metrics["envkit_env_sandboxes_lost_total"] == 2
        assert metrics["envkit_episodes_void_total"] == 1

    install_environment(tmp_path / "site-packages", "mine_env", MINE_ENV)
    with serving(kind, tmp_path, *ONE_SANDBOX, environments=tmp_path / "site-packages") as gateway:
        run(lambda: main(gateway), 180)


@both
def test_every_episode_ends_once_when_sandboxes_are_killed(kind: str, tmp_path: Path) -> None:
    figures = accounted_for(kind, tmp_path, 100, 0.15)

    assert figures["finished"] + figures["rebuilt"] + figures["void"] == 100


@pytest.mark.parametrize("kind", [LOCAL])
def test_a_script_continues_when_a_sandbox_is_killed(kind: str, tmp_path: Path) -> None:
    with serving(kind, tmp_path, *ONE_SANDBOX) as gateway:
        env = envkit.make("Sokoban-v0", url=gateway.url)
        try:
            env.reset(seed=5)
            env.step("<answer>right</answer>")
            (sandbox_id,) = clock.run(gateway.env_sandboxes).values()
            clock.run(gateway.kill_env_sandbox, sandbox_id)
            assert env.step("<answer>left</answer>")[4]["rebuilt"] == "killed by signal 9 (SIGKILL)"
        finally:
            env.close()
