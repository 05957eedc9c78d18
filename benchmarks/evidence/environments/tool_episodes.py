"""Play 1,000 episodes of an environment with a sandbox and tools, and fill an environment on a server.

The environment is ``Totals-v0`` of docs/write-an-environment.md, played by its oracle, eight episodes at once; each
episode uses one sandbox for the tools and then another for the grader. Afterwards the pool must have lent no sandbox.
The second part starts ``envkit serve`` with four places for the environment, and measures how long it takes to refuse
the fifth episode.

    python benchmarks/evidence/environments/tool_episodes.py

Requires bubblewrap. On two idle cores, 1,000 episodes take a few minutes.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser

from envkit import clock
from envkit.errors import CapacityError, SandboxLostError
from envkit.http.client.env_client import EnvClient
from envkit.http.protocol import messages
from envkit.http.protocol import operations as table
from envkit.protocols import EnvHost
from envkit.registry import load
from envkit.types import Task
from envkit.wiring.environments import Resources, find, slots
from envkit.wiring.sandboxes.tool_pool import open_tool_pool
from tests.docs.pages import GUIDE, LIFT, install
from tests.e2e.fleet.fleet import serving

NAME = "tool-episodes"
STALE_AFTER = (
    "docs/write-an-environment.md",
    "environments/tasks",
    "environments/tools",
    "envkit/wiring/gateway/trusted.py",
    "envkit/wiring/sandboxes/tool_pool.py",
    "sandbox/pool",
)
TWIN = (
    "tests/e2e/fleet/test_trusted_worker.py::"
    "test_a_lost_tool_sandbox_ends_exactly_its_episode_and_fifty_episodes_leave_no_sandbox"
)
ENV_ID = "Totals-v0"
EPISODES, AT_ONCE = 1000, 8
PLACES, REFUSALS = 4, 20


async def grade_of(host: EnvHost, seed: int) -> float | None:
    """Play an episode with the oracle and return its grade; None if it is void."""
    task = Task(ENV_ID, seed)
    async with host.lease(task) as episode:
        start = await episode.reset()
        player = load(find(ENV_ID).players["oracle"])().begin(task, start, random.Random(seed))
        step = await episode.step(await player.act(start.observation))
        while not step.ended:
            step = await episode.step(await player.act(step.observation))
        return await episode.grade()


async def play(episodes: int) -> dict[str, Any]:
    """Play episodes, and return the numbers of successes and void ones, and what the pool lends at the end."""
    fates: Counter[str] = Counter(successes=0, failures=0, void=0)
    began = clock.stopwatch()

    async with open_tool_pool("local") as pool, slots(AT_ONCE, {}, Resources(pool)) as host:

        async def worker(first: int) -> None:
            for seed in range(first, episodes, AT_ONCE):
                try:
                    grade = await grade_of(host, seed)
                except SandboxLostError:
                    grade = None
                fates["void" if grade is None else "successes" if grade == 1 else "failures"] += 1

        async with anyio.create_task_group() as tasks:
            for first in range(AT_ONCE):
                tasks.start_soon(worker, first)
        counts = pool.counts()
        return {
            "episodes": episodes,
            **fates,
            "sandboxes_started": counts.starts,
            "sandboxes_at_the_end": sum(counts.states.values()),
            "seconds": round(clock.stopwatch() - began),
        }


async def refuse(installed: Path, refusals: int) -> dict[str, Any]:
    """Fill an environment of a server, and return how long the refusal of further episodes takes, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ("envs.sandboxes=1", "envs.warm=0", f"envs.tool_episodes={PLACES}")
        with serving("local", Path(folder), *settings, environments=installed) as gateway:
            async with EnvClient(gateway.url) as client:

                async def create(name: str) -> None:
                    body = messages.CreateSessionBody(ENV_ID, 0, {}, session_id=name)
                    await client._connection.call(table.CREATE, body, 60)

                for number in range(PLACES):
                    await create(f"place-{number}")
                took_s = [await seconds_until_refusal(partial(create, f"more-{one}")) for one in range(refusals)]
    return {
        "places": PLACES,
        "refusals": refusals,
        "median_s": round(statistics.median(took_s), 4),
        "max_s": round(max(took_s), 4),
    }


async def seconds_until_refusal(create: partial[Any]) -> float:
    began = clock.stopwatch()
    with pytest.raises(CapacityError, match=f"all {PLACES} slots for {ENV_ID} are in use"):
        await create()
    return clock.stopwatch() - began


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--episodes", type=int, default=EPISODES)
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    with tempfile.TemporaryDirectory() as folder:
        installed = install(GUIDE, LIFT, Path(folder))
        sys.path.append(str(installed))
        part = f"{asked.episodes} episodes, {AT_ONCE} at once"
        print(part, evidence.part(part, partial(clock.run, partial(play, asked.episodes))), flush=True)
        part = f"refusal of episode {PLACES + 1} of {PLACES}"
        print(part, evidence.part(part, partial(clock.run, partial(refuse, installed, REFUSALS))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
