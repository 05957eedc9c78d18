"""Episodes of a real gateway whose sandboxes are killed or hang continue in another one."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from envkit import clock
from envkit.http.client.env_client import EnvClient
from envkit.protocols import Episode
from envkit.types import Reset, Step, Task
from envkit.wiring import environments
from tests.e2e.campaign import accounted_for, answers, moves_of, played, reported_rebuilds
from tests.e2e.fleet.fleet import DOCKER, LOCAL, Gateway, run, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes outlive a server"),
]

both = pytest.mark.parametrize("kind", [LOCAL, DOCKER])
ONE_SANDBOX = ("envs.sandboxes=1", "envs.warm=1", "restarts.budget=20", "restarts.window_s=0.5")
"""One sandbox and a warm one; the restart budget does not delay replacements."""

REPLACED_S = {"local": 0.5, "docker": 3.0}
"""Promised seconds until a step is answered after its sandbox was killed, with a warm sandbox."""
HUNG_S = 5.0
"""Promised seconds until a sandbox with a hanging env server is given up."""
REBUILD_S = 3.0
BUSY = 10.0
"""Factor on the promised times on a busy machine."""


def without_info(start: Reset, steps: Sequence[Step]) -> list[object]:
    return [start.observation, *(replace(step, info={}) for step in steps)]


@both
def test_an_episode_of_a_killed_sandbox_continues_in_a_warm_one_soon(kind: str, tmp_path: Path) -> None:
    async def main(gateway: Gateway) -> None:
        task = Task("Sokoban-v0", 3)
        moves = moves_of(task, 12)
        async with environments.slots(1) as here:
            undisturbed = await answers(here, task, moves)
        async with EnvClient(gateway.url) as client:
            await gateway.wait_for_warm(1)
            async with client.lease(task) as episode:
                start, steps = await episode.reset(), await played(episode, moves[:6])
                (sandbox_id,) = (await gateway.env_sandboxes()).values()
                began = clock.now()
                await gateway.kill_env_sandbox(sandbox_id)
                steps += await played(episode, moves[6:7])
                seconds = clock.now() - began
                steps += await played(episode, moves[7:])
            assert reported_rebuilds(steps[6:7]) == reported_rebuilds(steps) == ["killed by signal 9 (SIGKILL)"]
            assert without_info(start, steps) == without_info(*undisturbed)
        metrics = await gateway.metrics()
        assert metrics["envkit_env_sandboxes_lost_total"] == metrics["envkit_episodes_rebuilt_total"] == 1
        assert metrics["envkit_episodes_void_total"] == 0
        assert seconds < BUSY * REPLACED_S[kind]

    with serving(kind, tmp_path, *ONE_SANDBOX) as gateway:
        run(lambda: main(gateway), 180)


@pytest.mark.bwrap
def test_episodes_of_a_hanging_env_server_continue_elsewhere_soon(tmp_path: Path) -> None:
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

    with serving("local", tmp_path, *ONE_SANDBOX) as gateway:
        run(lambda: main(gateway), 120)


@pytest.mark.bwrap
def test_every_episode_ends_once_when_sandboxes_are_killed(tmp_path: Path) -> None:
    figures = accounted_for("local", tmp_path, 60, 0.15, sandboxes=4)

    assert figures["finished"] + figures["rebuilt"] + figures["void"] == 60
