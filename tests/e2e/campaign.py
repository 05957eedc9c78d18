"""Many episodes of a real server while some sandboxes are killed: each episode ends once, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import anyio
from msgspec.structs import replace

from envkit.errors import SandboxLostError
from envkit.fleet.episode import REBUILDS
from envkit.http.client.env_client import EnvClient
from envkit.protocols import EnvHost, Episode
from envkit.types import Observation, Reset, Step, Task
from envkit.wiring import environments
from tests.e2e.fleet.fleet import NOTHING, Gateway, install_environment, run, serving

CAMPAIGN_S = 600.0
"""Time limit of a campaign, in seconds."""

PLAYERS = 32
LONGEST_DELAY_S = 0.02
"""In seconds; most moves are answered within it."""
SEED = 5
MOVES = 7
KILLED = "killed by signal 9 (SIGKILL)"
ONCE = "Once-v0"
VOID = f"void: {KILLED}"
VOID_OF_TWO = {f"{VOID}; the previous worker was lost during the same {call}" for call in ("reset", "step")}
"""Causes if the sandbox of a repeated call is killed by chance, too: the call then looks like the culprit."""
ENV_IDS = ("FrozenLake-v0", "SimpleSokoban-v0", ONCE)
ONCE_ENV = """
from envkit.env import AsyncEnv
from envkit.registry import register
from envkit.types import Observation, Reset, Step

class Once(AsyncEnv):
    async def reset(self, *, seed, options):
        self.actions = []
        return Reset(Observation("nothing"), {})

    async def step(self, action):
        self.actions.append(action)
        return Step(Observation(" ".join(self.actions)), float(len(self.actions)), False, False, {})

    async def close(self):
        pass

def register_all():
    register("Once-v0", "once_env:Once", replayable=False)
"""


def moves_of(task: Task, count: int) -> list[str]:
    chance = random.Random(task.seed)
    return [f"<answer>{chance.choice(('up', 'down', 'left', 'right'))}</answer>" for _ in range(count)]


async def played(episode: Episode, moves: Sequence[str]) -> list[Step]:
    """Play until the moves or the episode end."""
    steps: list[Step] = []
    for move in moves:
        steps.append(await episode.step(move))
        if steps[-1].terminated or steps[-1].truncated:
            break
    return steps


async def answers(host: EnvHost, task: Task, moves: Sequence[str]) -> tuple[Reset, list[Step]]:
    async with host.lease(task) as episode:
        return await episode.reset(), await played(episode, moves)


def without_news(answer: Reset | Step) -> Reset | Step:
    """Return an answer without its report of a rebuild."""
    return replace(answer, info={key: value for key, value in answer.info.items() if key != "rebuilt"})


def recited(moves: Sequence[str]) -> list[Reset | Step]:
    """Return the answers of an undisturbed episode of `ONCE`."""
    texts = [" ".join(moves[:turn]) for turn in range(1, len(moves) + 1)]
    steps = [Step(Observation(text), float(turn), False, False, {}) for turn, text in enumerate(texts, 1)]
    return [Reset(Observation("nothing"), {"metrics": {}}), *steps]


def reported_rebuilds(answers: Sequence[Reset | Step]) -> list[object]:
    """Return the causes of the rebuilds that an episode's answers report."""
    return [answer.info["rebuilt"] for answer in answers if "rebuilt" in answer.info]


class Campaign:
    """Plays many episodes, kills the sandboxes of some meanwhile, and records the outcome of each.

    Args:
        gateway: The server that runs them.
        episodes: Their number.
        kill_chance: Probability in [0, 1] that the sandbox of an episode is killed.

    Attributes:
        outcomes: The outcomes of each episode, by its number.
        drawn: The episodes whose sandbox is to be killed.
        killed: The killed sandboxes with their episode. They are fewer than the drawn episodes if some of these shared
            a sandbox and ended before their next move.
        seen: Number of these that the gateway reported lost.
        rebuilds: Number of rebuilds that answers reported.
    """

    def __init__(self, gateway: Gateway, episodes: int, kill_chance: float) -> None:
        self.outcomes: dict[int, list[str]] = {number: [] for number in range(episodes)}
        self.drawn: set[int] = set()
        self.killed: dict[str, int] = {}
        self.seen = self.rebuilds = 0
        self._gateway = gateway
        self._kill_chance = kill_chance
        self._waiting = list(range(episodes))

    async def run(self) -> None:
        async with (
            EnvClient(self._gateway.url) as client,
            environments.slots(PLAYERS) as here,
            anyio.create_task_group() as self._tasks,
        ):
            for _ in range(PLAYERS):
                self._tasks.start_soon(self._play_all, client, here)

    async def _play_all(self, client: EnvClient, here: EnvHost) -> None:
        while self._waiting:
            number = self._waiting.pop()
            task = Task(ENV_IDS[number % len(ENV_IDS)], number)
            moves = moves_of(task, MOVES)
            if task.env_id == ONCE:
                unharmed = recited(moves)
            else:
                start, steps = await answers(here, task, moves)
                unharmed = [start, *steps]
            received: list[Reset | Step] = []
            before = self.seen
            try:
                await self._play(client, task, moves[: len(unharmed) - 1], received)
            except SandboxLostError as loss:
                outcome = f"void: {loss.cause}"
                self.outcomes[number].append(outcome)
                fewest = 1 if task.env_id == ONCE else 2 if outcome in VOID_OF_TWO else REBUILDS + 1
                assert len(self.killed) - before >= fewest
            else:
                assert len(received) == len(unharmed)
                self.outcomes[number].append("rebuilt" if reported_rebuilds(received) else "finished")
            self.rebuilds += reported_rebuilds(received).count(KILLED)
            assert [without_news(answer) for answer in received] == unharmed[: len(received)]

    async def _play(self, client: EnvClient, task: Task, moves: Sequence[str], received: list[Reset | Step]) -> None:
        """Play an episode; if its sandbox is to be killed, kill it at about the time of a random move."""
        number = task.seed
        chance = random.Random(f"{SEED}: {number}")
        turn, delay_s = chance.randrange(len(moves)), chance.uniform(0, LONGEST_DELAY_S)
        if chance.random() < self._kill_chance:
            self.drawn.add(number)
        async with client.lease(task, id=f"episode-{number}") as episode:
            received.append(await episode.reset())
            for played, move in enumerate(moves):
                is_due = played >= turn and number in self.drawn and number not in self.killed.values()
                async with self._killing(number, delay_s) if is_due else nullcontext():
                    received.append(await episode.step(move))

    @asynccontextmanager
    async def _killing(self, number: int, delay_s: float) -> AsyncIterator[None]:
        """Kill the sandbox of an episode after a delay, unless it is killed already; wait for that after the block."""
        sandbox = await self._gateway.seat(f"episode-{number}")
        sandbox_id = (await self._gateway.env_sandboxes()).get(sandbox or "")
        is_killed = anyio.Event()
        if sandbox is None or sandbox_id is None:
            is_killed.set()
        else:
            self._tasks.start_soon(self._kill, sandbox, sandbox_id, number, delay_s, is_killed)
        yield
        await is_killed.wait()

    async def _kill(self, sandbox: str, sandbox_id: str, number: int, delay_s: float, is_killed: anyio.Event) -> None:
        await anyio.sleep(delay_s)
        is_killed.set()
        if sandbox not in self.killed:
            os.kill(self._gateway.first_pid(sandbox_id), signal.SIGKILL)
            self.killed[sandbox] = number
            assert await self._gateway.becomes(sandbox, "lost") == KILLED
            self.seen += 1


def accounted_for(kind: str, folder: Path, episodes: int, kill_chance: float, *, sandboxes: int = 8) -> dict[str, int]:
    """Play a campaign on a server of its own; check that each episode ended once, and that nothing is left.

    Args:
        kind: Backend of the server.
        folder: An empty folder for the server's state and its environment.
        episodes: Number of episodes.
        kill_chance: Probability in [0, 1] that the sandbox of an episode is killed.
        sandboxes: Number of sandboxes of the server; half as many are warm.

    Returns:
        The numbers of finished, rebuilt and void episodes, of killed sandboxes, and of rebuilds.
    """
    figures: dict[str, int] = {}

    async def main(gateway: Gateway) -> None:
        campaign = Campaign(gateway, episodes, kill_chance)
        await campaign.run()
        counted = Counter(outcome for outcomes in campaign.outcomes.values() for outcome in outcomes)
        assert all(len(outcomes) == 1 for outcomes in campaign.outcomes.values())
        assert counted.total() == episodes
        assert counted.keys() - VOID_OF_TWO == {"finished", "rebuilt", VOID}, counted
        kills = len(campaign.killed)
        assert len(campaign.drawn) > 0.4 * episodes * kill_chance
        assert 0.5 * len(campaign.drawn) < kills <= len(campaign.drawn)
        assert campaign.seen == kills
        metrics = await gateway.metrics()
        losses = {
            name: count for name, count in metrics.items() if count and name.startswith("envkit_sandboxes_lost_total")
        }
        assert losses == {'envkit_sandboxes_lost_total{cause="killed"}': kills}
        assert metrics["envkit_env_sandboxes_lost_total"] == kills
        assert metrics["envkit_sessions_created_total"] == episodes
        void = sum(counted[outcome] for outcome in {VOID, *VOID_OF_TWO})
        assert metrics["envkit_episodes_void_total"] == void
        # An answer reports one rebuild even after several; episodes that finished undisturbed had no rebuild.
        rebuilt = metrics["envkit_episodes_rebuilt_total"]
        assert campaign.rebuilds <= rebuilt <= REBUILDS * (episodes - counted["finished"])
        assert await gateway.end() == 0
        assert gateway.left() == NOTHING
        figures.update(finished=counted["finished"], rebuilt=counted["rebuilt"], void=void, killed_boxes=kills)
        figures.update(rebuilds=round(rebuilt))

    install_environment(folder / "site-packages", "once_env", ONCE_ENV)
    settings = (
        f"envs.sandboxes={sandboxes}",
        f"envs.warm={sandboxes // 2}",
        "restarts.budget=1000",
        "restarts.window_s=0.5",
    )
    with serving(kind, folder, *settings, environments=folder / "site-packages") as gateway:
        run(lambda: main(gateway), CAMPAIGN_S)
    return figures
