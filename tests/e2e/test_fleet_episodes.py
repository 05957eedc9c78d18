"""Episodes of a real gateway whose boxes are killed or hang: they go on in another one, and each is accounted for."""

from __future__ import annotations

import os
import random
import signal
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

import envkit
from envkit import clock
from envkit.errors import SandboxLostError
from envkit.fleet.episode import REBUILDS
from envkit.http.client import EnvClient
from envkit.protocols import EnvHost, Episode
from envkit.types import Observation, Reset, Step, Task
from envkit.wiring import envs
from tests.e2e.fleet import DOCKER, LOCAL, NOTHING, Gateway, install_world, run, serving

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes outlive a server")

both = pytest.mark.parametrize("kind", [LOCAL, DOCKER])
ONE_BOX = ("envs.boxes=1", "envs.spares=1", "restarts.budget=20", "restarts.window_s=0.5")
"""One box, and a spare; of the kills none is so soon after another one that its replacement would have to wait."""

KILLS = 5
REPLACED_S = {"local": 0.5, "docker": 3.0}
"""Seconds within which an answer comes although the box was killed, where there is a spare, as it is promised."""
HUNG_S = 5.0
"""Likewise until a box whose env server hangs is left."""
REBUILD_S = 3.0
BUSY = 2.0
"""How many times as long things may take on a machine that does other things too."""

EPISODES = 400
PLAYERS = 32
KILL_CHANCE = 0.05
LONGEST_DELAY_S = 0.02
"""Seconds within which most moves are answered."""
SEED = 5
MOVES = 7
KILLED = "killed by signal 9 (SIGKILL)"
ONCE = "Once-v0"
VOID = f"void: {KILLED}"
VOID_OF_TWO = {f"{VOID}; the box before was lost during the same {call} too" for call in ("reset", "step")}
"""What is said where chance has killed the box of a call that was made again, too: it looks as if the call did."""
WORLDS = ("FrozenLake-v0", "SimpleSokoban-v0", ONCE)
ONCE_WORLD = """
from envkit.env import AsyncEnv
from envkit.registry import register
from envkit.types import Observation, Reset, Step

class Once(AsyncEnv):
    async def reset(self, *, seed, options):
        self.said = []
        return Reset(Observation("nothing"), {})

    async def step(self, action):
        self.said.append(action)
        return Step(Observation(" ".join(self.said)), float(len(self.said)), False, False, {})

    async def close(self):
        pass

def register_all():
    register("Once-v0", "once_world:Once", replayable=False)
"""
MINE = "Mine-v0"
MINE_WORLD = """
import os
from envkit.env import AsyncEnv
from envkit.registry import register
from envkit.types import Observation, Reset, Step

class Mine(AsyncEnv):
    async def reset(self, *, seed, options):
        self.said = [str(seed)]
        return Reset(Observation("nothing"), {})

    async def step(self, action):
        if action == "boom":
            os._exit(1)
        self.said.append(action)
        return Step(Observation(" ".join(self.said)), float(len(self.said)), False, False, {})

    async def close(self):
        pass

def register_all():
    register("Mine-v0", "mine_world:Mine")
"""
CULPRIT = 7
OTHERS = 20


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


def without_info(start: Reset, steps: Sequence[Step]) -> list[object]:
    return [start.observation, *(replace(step, info={}) for step in steps)]


def without_news(answer: Reset | Step) -> Reset | Step:
    """An answer, but for what it says of rebuilds."""
    return replace(answer, info={key: value for key, value in answer.info.items() if key != "rebuilt"})


def recited(moves: Sequence[str]) -> list[Reset | Step]:
    """What an undisturbed episode of `ONCE` answers."""
    said = [" ".join(moves[:turn]) for turn in range(1, len(moves) + 1)]
    steps = [Step(Observation(text), float(turn), False, False, {}) for turn, text in enumerate(said, 1)]
    return [Reset(Observation("nothing"), {"metrics": {}}), *steps]


def told(answers: Sequence[Reset | Step]) -> list[object]:
    """The rebuilds that an episode's answers speak of."""
    return [answer.info["rebuilt"] for answer in answers if "rebuilt" in answer.info]


@both
def test_an_episode_whose_box_is_killed_goes_on_in_a_spare_in_time_and_as_if_nothing_was(
    kind: str, tmp_path: Path
) -> None:
    async def main(gateway: Gateway) -> None:
        task = Task("Sokoban-v0", 3)
        moves = moves_of(task, 12)
        async with envs.slots(1) as here:
            undisturbed = await answers(here, task, moves)
        seconds: list[float] = []
        async with EnvClient(gateway.url) as client:
            for _ in range(KILLS):
                await gateway.spares(1)
                async with client.lease(task) as episode:
                    start, steps = await episode.reset(), await played(episode, moves[:6])
                    (box_id,) = (await gateway.boxes(are_env_boxes=True)).values()
                    began = clock.now()
                    await gateway.kill_env_box(box_id)
                    steps += await played(episode, moves[6:7])
                    seconds.append(clock.now() - began)
                    steps += await played(episode, moves[7:])
                assert told(steps[6:7]) == told(steps) == ["killed by signal 9 (SIGKILL)"]
                assert without_info(start, steps) == without_info(*undisturbed)
        metrics = await gateway.metrics()
        assert metrics["envkit_env_boxes_lost_total"] == metrics["envkit_episodes_rebuilt_total"] == KILLS
        assert metrics["envkit_episodes_void_total"] == 0
        assert statistics.median(seconds) < BUSY * REPLACED_S[kind]

    with serving(kind, tmp_path, *ONE_BOX) as gateway:
        run(lambda: main(gateway), 60)


@both
def test_episodes_whose_env_server_hangs_go_on_elsewhere_within_five_seconds(kind: str, tmp_path: Path) -> None:
    async def main(gateway: Gateway) -> None:
        tasks = [Task("Sokoban-v0", 3), Task("FrozenLake-v0", 4)]
        seconds: list[float] = []
        async with envs.slots(2) as here, EnvClient(gateway.url) as client:
            await gateway.spares(1)
            async with client.lease(tasks[0]) as one, client.lease(tasks[1]) as two:

                async def play_on(task: Task, episode: Episode) -> None:
                    """Play on in a box that hangs from now on."""
                    moves = moves_of(task, 5)
                    undisturbed = await answers(here, task, moves)
                    began = clock.now()
                    steps = before[task.seed][1] + await played(episode, moves[2:])
                    seconds.append(clock.now() - began)
                    assert told(steps[2:3]) == told(steps) == ["its env server was silent for 4 s"]
                    assert without_info(before[task.seed][0], steps) == without_info(*undisturbed)

                before: dict[int, tuple[Reset, list[Step]]] = {}
                for task, episode in zip(tasks, (one, two), strict=True):
                    before[task.seed] = await episode.reset(), await played(episode, moves_of(task, 2))
                (box_id,) = (await gateway.boxes(are_env_boxes=True)).values()
                os.kill(gateway.env_server(box_id), signal.SIGSTOP)
                async with anyio.create_task_group() as group:
                    for task, episode in zip(tasks, (one, two), strict=True):
                        group.start_soon(play_on, task, episode)
        assert max(seconds) < HUNG_S + REBUILD_S

    with serving(kind, tmp_path, *ONE_BOX) as gateway:
        run(lambda: main(gateway), 40)


@pytest.mark.parametrize("kind", [LOCAL])
def test_an_episode_whose_step_ends_its_box_is_void_after_the_second_and_twenty_others_there_play_on(
    kind: str, tmp_path: Path
) -> None:
    async def main(gateway: Gateway) -> None:
        heard: dict[int, list[Step]] = {seed: [] for seed in range(OTHERS + 1)}
        void: dict[int, str] = {}
        last_turn = 3

        async def play(episode: Episode, seed: int, turn: int) -> None:
            try:
                heard[seed].append(await episode.step("boom" if (seed, turn) == (CULPRIT, 2) else f"move {turn}"))
            except SandboxLostError as loss:
                void[seed] = loss.cause

        async with EnvClient(gateway.url) as client, AsyncExitStack() as leases:
            episodes = {seed: await leases.enter_async_context(client.lease(Task(MINE, seed, {}))) for seed in heard}
            for episode in episodes.values():
                await episode.reset()
            for turn in range(last_turn + 1):
                async with anyio.create_task_group() as tasks:
                    for seed in heard.keys() - void.keys():
                        tasks.start_soon(play, episodes[seed], seed, turn)
        said = "exited with code 1"
        assert void == {CULPRIT: f"{said}; the box before was lost during the same step too"}
        for seed, steps in heard.items():
            count = 2 if seed == CULPRIT else last_turn + 1
            texts = [" ".join([str(seed), *(f"move {turn}" for turn in range(end))]) for end in range(1, count + 1)]
            unharmed = [Step(Observation(text), float(n), False, False, {}) for n, text in enumerate(texts, 2)]
            assert [without_news(step) for step in steps] == unharmed
            assert set(told(steps)) <= {said}
        metrics = await gateway.metrics()
        assert metrics["envkit_env_boxes_lost_total"] == 2
        assert metrics["envkit_episodes_void_total"] == 1

    install_world(tmp_path / "site-packages", "mine_world", MINE_WORLD)
    with serving(kind, tmp_path, *ONE_BOX, worlds=tmp_path / "site-packages") as gateway:
        run(lambda: main(gateway), 60)


class Campaign:
    """Many episodes, of which some have their box killed while they are played, and what became of each.

    Attributes:
        outcomes: What became of each episode, by its number.
        drawn: The episodes whose box chance wanted to be killed.
        killed: The sandboxes that were killed, and for which episode. Fewer than those drawn, where several in one box
            were: the others go on in another box, which is killed at their next move, or are over.
        seen: Number of these that the gateway has said to be lost.
        rebuilds: Number of rebuilds that answers spoke of.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.outcomes: dict[int, list[str]] = {number: [] for number in range(EPISODES)}
        self.drawn: set[int] = set()
        self.killed: dict[str, int] = {}
        self.seen = self.rebuilds = 0
        self._gateway = gateway
        self._waiting = list(range(EPISODES))

    async def run(self) -> None:
        async with (
            EnvClient(self._gateway.url) as client,
            envs.slots(PLAYERS) as here,
            anyio.create_task_group() as self._tasks,
        ):
            for _ in range(PLAYERS):
                self._tasks.start_soon(self._play_all, client, here)

    async def _play_all(self, client: EnvClient, here: EnvHost) -> None:
        while self._waiting:
            number = self._waiting.pop()
            task = Task(WORLDS[number % len(WORLDS)], number)
            moves = moves_of(task, MOVES)
            if task.env_id == ONCE:
                unharmed = recited(moves)
            else:
                start, steps = await answers(here, task, moves)
                unharmed = [start, *steps]
            heard: list[Reset | Step] = []
            before = self.seen
            try:
                await self._play(client, task, moves[: len(unharmed) - 1], heard)
            except SandboxLostError as loss:
                outcome = f"void: {loss.cause}"
                self.outcomes[number].append(outcome)
                fewest = 1 if task.env_id == ONCE else 2 if outcome in VOID_OF_TWO else REBUILDS + 1
                assert len(self.killed) - before >= fewest
            else:
                assert len(heard) == len(unharmed)
                self.outcomes[number].append("rebuilt" if told(heard) else "finished")
            self.rebuilds += told(heard).count(KILLED)
            assert [without_news(answer) for answer in heard] == unharmed[: len(heard)]

    async def _play(self, client: EnvClient, task: Task, moves: Sequence[str], heard: list[Reset | Step]) -> None:
        """Play an episode; if chance wants it, its box is killed about when a move is played that chance has chosen."""
        number = task.seed
        chance = random.Random(f"{SEED}: {number}")
        turn, delay_s = chance.randrange(len(moves)), chance.uniform(0, LONGEST_DELAY_S)
        if chance.random() < KILL_CHANCE:
            self.drawn.add(number)
        async with client.lease(task, id=f"episode-{number}") as episode:
            heard.append(await episode.reset())
            for played, move in enumerate(moves):
                is_due = played >= turn and number in self.drawn and number not in self.killed.values()
                async with self._killing(number, delay_s) if is_due else nullcontext():
                    heard.append(await episode.step(move))

    @asynccontextmanager
    async def _killing(self, number: int, delay_s: float) -> AsyncIterator[None]:
        """Have the box of an episode killed in a moment, unless it is killed already, and wait for that."""
        sandbox = await self._gateway.seat(f"episode-{number}")
        box_id = (await self._gateway.boxes(are_env_boxes=True)).get(sandbox or "")
        is_killed = anyio.Event()
        if sandbox is None or box_id is None:
            is_killed.set()
        else:
            self._tasks.start_soon(self._kill, sandbox, box_id, number, delay_s, is_killed)
        yield
        await is_killed.wait()

    async def _kill(self, sandbox: str, box_id: str, number: int, delay_s: float, is_killed: anyio.Event) -> None:
        await anyio.sleep(delay_s)
        is_killed.set()
        if sandbox not in self.killed:
            os.kill(self._gateway.first_pid(box_id), signal.SIGKILL)
            self.killed[sandbox] = number
            assert await self._gateway.becomes(sandbox, "lost") == KILLED
            self.seen += 1


@pytest.mark.slow
@both
def test_of_hundreds_of_episodes_of_which_each_twentieth_has_its_box_killed_each_ends_once_and_nothing_is_left(
    kind: str, tmp_path: Path
) -> None:
    async def main(gateway: Gateway) -> None:
        campaign = Campaign(gateway)
        await campaign.run()
        counted = Counter(outcome for said in campaign.outcomes.values() for outcome in said)
        assert all(len(said) == 1 for said in campaign.outcomes.values())
        assert counted.total() == EPISODES
        assert counted.keys() - VOID_OF_TWO == {"finished", "rebuilt", VOID}
        kills = len(campaign.killed)
        assert 0.6 * EPISODES * KILL_CHANCE < kills <= len(campaign.drawn)
        assert campaign.seen == kills
        metrics = await gateway.metrics()
        losses = {name: count for name, count in metrics.items() if name.startswith("envkit_sandboxes_lost_total")}
        assert losses == {'envkit_sandboxes_lost_total{cause="killed"}': kills}
        assert metrics["envkit_env_boxes_lost_total"] == kills
        assert metrics["envkit_sessions_created_total"] == EPISODES
        assert metrics["envkit_episodes_void_total"] == sum(counted[outcome] for outcome in {VOID, *VOID_OF_TWO})
        # An answer speaks of one rebuild, also when it has taken more; whoever finished unharmed has had none.
        rebuilt = metrics["envkit_episodes_rebuilt_total"]
        assert campaign.rebuilds <= rebuilt <= REBUILDS * (EPISODES - counted["finished"])
        assert await gateway.end() == 0
        assert gateway.left() == NOTHING

    install_world(tmp_path / "site-packages", "once_world", ONCE_WORLD)
    settings = ("envs.boxes=8", "envs.spares=4", "restarts.budget=1000", "restarts.window_s=0.5")
    with serving(kind, tmp_path, *settings, worlds=tmp_path / "site-packages") as gateway:
        run(lambda: main(gateway), 300)


@pytest.mark.parametrize("kind", [LOCAL])
def test_a_script_plays_on_when_a_box_is_killed(kind: str, tmp_path: Path) -> None:
    with serving(kind, tmp_path, *ONE_BOX) as gateway:
        env = envkit.make("Sokoban-v0", url=gateway.url)
        try:
            env.reset(seed=5)
            env.step("<answer>right</answer>")
            (box_id,) = clock.run(partial(gateway.boxes, are_env_boxes=True)).values()
            clock.run(gateway.kill_env_box, box_id)
            assert env.step("<answer>left</answer>")[4]["rebuilt"] == "killed by signal 9 (SIGKILL)"
        finally:
            env.close()
