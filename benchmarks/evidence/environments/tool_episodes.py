"""Play 1,000 episodes of an environment with a sandbox and tools, and fill and burden an environment on a server.

The environment is ``Totals-v0`` of docs/write-an-environment.md, played by its oracle; each episode uses one sandbox
for the tools and then another for the grader. The second part starts ``envkit serve`` with four places for the
environment, and measures how long it takes to refuse the fifth episode. The third part measures the steps of a tenant
in ``SWE-v0`` on a server while another tenant's submission is graded, in turns with steps without one: a huge line of
calls, 16 MiB of line ends in the report of the tests, a flood of output, and source that hangs. A step may take 2 s
longer.

    python benchmarks/evidence/environments/tool_episodes.py

Requires bubblewrap. On two idle cores, it takes about ten minutes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser
from record.players import play

from envkit import clock
from envkit.environments.swe import Swe
from envkit.environments.tasks import Cheat
from envkit.environments.tools import write_call
from envkit.errors import CapacityError
from envkit.http.client.env_client import EnvClient
from envkit.http.protocol import messages
from envkit.http.protocol import operations as table
from envkit.protocols import Episode
from envkit.types import RolloutRequest, Task
from envkit_cheats.swe import CHEATS
from tests.docs.pages import GUIDE, LIFT, install
from tests.e2e.fleet.fleet import serving
from tests.e2e.serve.gateway import gateway

NAME = "tool-episodes"
STALE_AFTER = (
    "docs/write-an-environment.md",
    "environments/swe",
    "environments/tasks",
    "environments/tools",
    "envkit/wiring/gateway/trusted.py",
    "envkit/wiring/sandboxes/backends.py",
    "sandbox/pool",
)
TWIN = (
    "tests/e2e/fleet/test_trusted_worker.py::"
    "test_a_lost_tool_sandbox_ends_exactly_its_episode_and_fifty_episodes_leave_no_sandbox"
)
ENV_ID = "Totals-v0"
EPISODES = 1000
PLACES, REFUSALS = 4, 20
SWE_ID = "SWE-v0"
SUBMISSIONS = Swe.cheats(
    {
        "huge line": Cheat("Calls 200,000 functions in one another.", "type(" * 200_000 + "\n"),
        "line ends": Cheat(
            "Writes 16 MiB of line ends into the report.",
            "\nimport os\nfor _ in range(16): os.write(3, b'\\n' * (1 << 20))\n",
        ),
        "flood": CHEATS["flood"],
        "hang": CHEATS["hang"],
    }
)
SERVER = """
backend: local
listen: {port: 0}
node: {max_sandboxes: 8}
envs: {sandboxes: 1, warm: 0, tool_episodes: 4}
"""
TURNS, WINDOW_S, MOST_S = 3, 10.0, 2.0


async def refuse(installed: Path, refusals: int) -> dict[str, Any]:
    """Fill an environment of a server, and return how long the refusal of further episodes takes, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ("envs.sandboxes=1", "envs.warm=0", f"envs.tool_episodes={PLACES}")
        with serving("local", Path(folder), *settings, environments=installed) as server:
            async with EnvClient(server.url) as client:

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
    with pytest.raises(CapacityError, match=f"all {PLACES} slots for environments with tools are in use"):
        await create()
    return clock.stopwatch() - began


async def submit(client: EnvClient, name: str, is_written: anyio.Event) -> None:
    """Play an episode with a submission; set the event when only its submission and grading remain."""
    task = Task(SWE_ID, 0)
    async with client.lease(task) as episode:
        step = start = await episode.reset()
        player = SUBMISSIONS[f"cheat:{name}"]().begin(RolloutRequest("submission", task, 0), start)
        is_over = False
        while not is_over:
            action = await player.act(step.observation)
            if action == write_call("submit"):
                is_written.set()
            step = await episode.step(action)
            is_over = step.ended
        await episode.grade()


async def steps(episode: Episode) -> list[float]:
    """Play steps that do nothing, for `WINDOW_S`, and return their seconds."""
    took_s: list[float] = []
    until = clock.now() + WINDOW_S
    while clock.now() < until:
        began = clock.stopwatch()
        await episode.step(write_call("bash", command="true"))
        took_s.append(clock.stopwatch() - began)
        await anyio.sleep(0.05)
    return took_s


async def burden(name: str) -> dict[str, Any]:
    """Return the times of a tenant's steps without and with another tenant's submission, in turns."""
    took_s: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder, gateway(Path(folder), SERVER) as server:
        tokens = (server.token(tenant, "play") for tenant in ("first", "second"))
        first, second = (EnvClient(server.url, token=token) for token in tokens)
        async with first, second, first.lease(Task(SWE_ID, 0, {"max_turns": 100_000})) as episode:
            await episode.reset()
            for _ in range(TURNS):
                took_s["without"] += await steps(episode)
                async with anyio.create_task_group() as tasks:
                    is_written = anyio.Event()
                    tasks.start_soon(submit, second, name, is_written)
                    await is_written.wait()
                    took_s["with"] += await steps(episode)
                    tasks.cancel_scope.cancel()
    figures = {
        which: {"steps": len(some), "p50_s": round(statistics.median(some), 3), "max_s": round(max(some), 3)}
        for which, some in took_s.items()
    }
    return {**figures, "longer_s": round(max(took_s["with"]) - max(took_s["without"]), 3)}


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--episodes", type=int, default=EPISODES)
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    with tempfile.TemporaryDirectory() as folder:
        installed = install(GUIDE, LIFT, Path(folder))
        sys.path.append(str(installed))
        part = f"{asked.episodes} episodes"
        call = partial(play, ENV_ID, asked.episodes, options={}, repeat=1, backend="local", players=["oracle"])
        print(part, evidence.part(part, call), flush=True)
        part = f"refusal of episode {PLACES + 1} of {PLACES}"
        print(part, evidence.part(part, partial(clock.run, partial(refuse, installed, REFUSALS))), flush=True)
    longer_s = []
    for cheat in SUBMISSIONS:
        name = cheat.removeprefix("cheat:")
        figures = evidence.part(f"{TURNS} turns, {name}", partial(clock.run, partial(burden, name)))
        longer_s.append(figures["longer_s"])
        print(name, figures, flush=True)
    return 0 if max(longer_s) <= MOST_S else 1


if __name__ == "__main__":
    sys.exit(main())
