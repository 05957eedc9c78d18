"""Many terminal episodes of a real server while some sandboxes are killed: each ends once, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import anyio

from envkit.environments.tools import write_call
from envkit.errors import SandboxLostError
from envkit.http.client.env_client import EnvClient
from envkit.sandbox.docker.images import OFFLINE_BASE
from envkit.types import Task
from tests.e2e.campaign import CAMPAIGN_S, KILLED, SEED, VOID
from tests.e2e.fleet.fleet import NOTHING, Gateway, install_environment, run, serving
from tests.environments.terminal.tiny import SOLUTION, write_tiny

AT_ONCE = 16
LONGEST_DELAY_S = 0.2
"""In seconds; an episode takes about as long at least."""
MODES = {"TinyBash-v0": "bash", "TinyScreen-v0": "screen"}
ENV = """
from envkit.environments.terminal import Terminal
from envkit.registry import register

class Bash(Terminal):
    def __init__(self, **more):
        super().__init__(tasks={tasks!r}, image={image!r}, mode="bash", **more)

class Screen(Terminal):
    def __init__(self, **more):
        super().__init__(tasks={tasks!r}, image={image!r}, mode="screen", **more)

def register_all():
    register("TinyBash-v0", "tiny_env:Bash", needs={{"sandbox"}}, replayable=False)
    register("TinyScreen-v0", "tiny_env:Screen", needs={{"sandbox"}}, replayable=False)
"""


class TerminalCampaign:
    """Plays many episodes, half of them with a screen, and kills the sandboxes of some meanwhile.

    Args:
        gateway: The server that runs them.
        episodes: Their number.
        kill_chance: Probability in [0, 1] that a sandbox, of an agent or of a verifier, is killed.

    Attributes:
        outcomes: The outcomes of each episode, by its number.
        killed: Number of killed sandboxes.
        started: Number of sandboxes that were seen.
    """

    def __init__(self, gateway: Gateway, episodes: int, kill_chance: float) -> None:
        self.outcomes: dict[int, list[str]] = {number: [] for number in range(episodes)}
        self.killed = self.started = 0
        self._gateway = gateway
        self._kill_chance = kill_chance
        self._waiting = list(range(episodes))

    async def run(self) -> None:
        async with EnvClient(self._gateway.url) as client, anyio.create_task_group() as killers:
            killers.start_soon(self._kill_some)
            async with anyio.create_task_group() as players:
                for _ in range(AT_ONCE):
                    players.start_soon(self._play_all, client)
            killers.cancel_scope.cancel()

    async def _play_all(self, client: EnvClient) -> None:
        while self._waiting:
            number = self._waiting.pop()
            try:
                outcome = f"reward {await self._play(client, number)}"
            except SandboxLostError as loss:
                outcome = f"void: {loss.cause}"
            self.outcomes[number].append(outcome)

    async def _play(self, client: EnvClient, number: int) -> float | None:
        env_id = list(MODES)[number % 2]
        work = f"sleep 0.1; {SOLUTION}"
        async with client.lease(Task(env_id, number)) as episode:
            await episode.reset()
            await episode.step(
                write_call("bash", command=work)
                if MODES[env_id] == "bash"
                else write_call("type_keys", keys=work, wait_s=30)
            )
            step = await episode.step(write_call("submit"))
            assert step.terminated
            return await episode.grade()

    async def _kill_some(self) -> None:
        """Kill some of the sandboxes, each at a random time after it was first seen."""
        chance, seen = random.Random(SEED), set[str]()
        async with anyio.create_task_group() as tasks:
            while True:
                for id, sandbox_id in (await self._gateway.user_sandboxes()).items():
                    if id not in seen:
                        seen.add(id)
                        self.started = len(seen)
                        if chance.random() < self._kill_chance:
                            tasks.start_soon(self._kill, sandbox_id, chance.uniform(0, LONGEST_DELAY_S))
                await anyio.sleep(0.02)

    async def _kill(self, sandbox_id: str, delay_s: float) -> None:
        await anyio.sleep(delay_s)
        with suppress(AssertionError, ValueError, ProcessLookupError):  # its episode has ended
            os.kill(self._gateway.first_pid(sandbox_id), signal.SIGKILL)
            self.killed += 1


def terminals_accounted_for(kind: str, folder: Path, episodes: int, kill_chance: float) -> dict[str, int]:
    """Play a campaign on a server of its own; check that each episode ended once, and that nothing is left.

    Args:
        kind: Backend of the server.
        folder: An empty folder for the server's state and its environment.
        episodes: Number of episodes.
        kill_chance: Probability in [0, 1] that a sandbox is killed.

    Returns:
        The numbers of finished and void episodes, of the sandboxes that were seen, killed, and lost by the server.
    """
    figures: dict[str, int] = {}

    async def main(gateway: Gateway) -> None:
        campaign = TerminalCampaign(gateway, episodes, kill_chance)
        await campaign.run()
        assert all(len(outcomes) == 1 for outcomes in campaign.outcomes.values())
        counted = Counter(outcome for outcomes in campaign.outcomes.values() for outcome in outcomes)
        assert counted.keys() <= {"reward 1.0", VOID}, counted
        with anyio.fail_after(20):
            while await gateway.user_sandboxes():  # noqa: ASYNC110
                await anyio.sleep(0.05)
        metrics = await gateway.metrics()
        losses = metrics.get(f'envkit_sandboxes_lost_total{{cause="{KILLED.split()[0]}"}}', 0)
        assert metrics["envkit_sessions_created_total"] == episodes
        assert counted[VOID] <= losses <= campaign.killed
        assert await gateway.end() == 0
        assert gateway.left() == NOTHING
        figures.update(finished=counted["reward 1.0"], void=counted[VOID], sandboxes=campaign.started)
        figures.update(killed=campaign.killed, lost=round(losses))

    image = OFFLINE_BASE if kind == "docker" else None
    source = ENV.format(tasks=str(write_tiny(folder)), image=image)
    install_environment(folder / "site-packages", "tiny_env", source)
    settings = ("envs.sandboxes=1", "envs.warm=0", f"envs.tool_episodes={AT_ONCE}")
    with serving(kind, folder, *settings, environments=folder / "site-packages") as gateway:
        run(lambda: main(gateway), CAMPAIGN_S)
    return figures
