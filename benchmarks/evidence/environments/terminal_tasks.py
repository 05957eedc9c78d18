"""Build the images of Terminal-v0's own tasks, and play all tasks with the oracle, the nop and every cheat.

The oracle must earn 1, and the nop and every cheat 0: in Docker for all own tasks, and in the local sandbox for those
whose programs this machine has. The same holds for three tasks of each family. A trial is an episode of the oracle
with the verification, without the pool's start; the figure is the median of three.

    python benchmarks/evidence/environments/terminal_tasks.py
    python benchmarks/evidence/environments/terminal_tasks.py --task log-rotation --backend local

Requires bubblewrap, Docker with the image ``envkit/base:bookworm``, and a Debian archive for the builds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser

from envkit import clock
from envkit.checks.tasks import check_tasks
from envkit.environments.terminal import Terminal, commands
from envkit.environments.terminal.families import FAMILIES
from envkit.environments.terminal.formats import read_tasks
from envkit.environments.terminal.images import image_of
from envkit.environments.terminal.options import OWN_TASKS
from envkit.environments.terminal.tasks import TerminalTask
from envkit.runs.display import SilentDisplay
from envkit.types import RolloutRequest, Task
from envkit.wiring.commands import run
from envkit.wiring.environments import find
from envkit.wiring.sandboxes.tool_pool import open_tool_pool

NAME = "terminal-tasks"
STALE_AFTER = (
    "cheats",
    "environments/tasks",
    "environments/terminal",
    "environments/tools",
    "envkit/checks/tasks.py",
)
TWIN = "tests/environments/terminal/own/test_players.py::test_the_oracle_earns_1_and_every_cheat_0"
ENV_ID = "Terminal-v0"
BACKENDS = ("docker", "local")
BASE = "envkit/base:bookworm"
TRIALS, FAMILY_TASKS, DIFFICULTY = 3, 3, 2


def build(tasks: Sequence[TerminalTask], *, anew: bool) -> dict[str, Any]:
    """Build the image of tasks and return its name and the seconds.

    Args:
        tasks: Tasks that share an image.
        anew: Build it even if it exists, on a base image with a new label, so that Docker uses no cached layer.
    """
    image, base = image_of(tasks[0]), BASE
    if anew:
        base = f"envkit-evidence/base:{os.getpid()}"
        label = ["--label", f"envkit.evidence={clock.wall()}"]
        command = ["docker", "build", "--quiet", *label, "--tag", base, "-"]
        subprocess.run(command, input=f"FROM {BASE}\n".encode(), stdout=subprocess.DEVNULL, check=True)
        subprocess.run(["docker", "rmi", image], capture_output=True, check=False)
    chosen = {"name": [task.name for task in tasks], "tasks": tasks[0].folder.parent, "base": base}
    (table,) = run(find(ENV_ID), "build", commands.build, chosen, display=SilentDisplay()).parts
    if anew:
        subprocess.run(["docker", "rmi", base], capture_output=True, check=False)
    took = table[1][1]
    seconds = None if took == "exists" else float(took.removesuffix(" s"))
    return {"image": image, "tasks": len(tasks), "build_s": seconds}


def options_of(folder: Path, backend: str) -> dict[str, Any]:
    return {"tasks": str(folder), "image": "task" if backend == "docker" else None}


def trial(options: dict[str, Any], seed: int, backend: str) -> tuple[float | None, float]:
    """Return the reward and the seconds of an episode of the oracle."""

    async def main() -> tuple[float | None, float]:
        async with open_tool_pool(backend) as pool:
            env = Terminal(sandboxes=pool, **options)
            began = clock.stopwatch()
            step = start = await env.reset(seed=seed, options={})
            player = Terminal.oracle(**options).begin(RolloutRequest("trial", Task(ENV_ID, seed, options), seed), start)
            is_over = False
            while not is_over:
                step = await env.step(await player.act(step.observation))
                is_over = step.terminated or step.truncated
            reward = await env.grade()
            seconds = clock.stopwatch() - began
            await env.close()
            return reward, seconds

    return clock.run(main)


def play(folder: Path, count: int, backend: str) -> dict[str, Any]:
    """Play the tasks of a folder, and return the episodes and successes of each kind of player."""
    options = options_of(folder, backend)
    results, _ = check_tasks(ENV_ID, tasks=count, repeat=1, options=options, backend=backend)
    figures: dict[str, Any] = {}
    for one in results:
        kind = figures.setdefault(one.player.partition(":")[0], {"players": 0, "episodes": 0, "successes": 0})
        kind["players"] += 1
        kind["episodes"] += len(one.episodes)
        kind["successes"] += one.successes
    trials = [trial(options, number % count, backend) for number in range(TRIALS)]
    problems = [line for one in results for line in one.problems()]
    problems += [f"the oracle has earned {reward} in a trial" for reward, _ in trials if reward != 1.0]
    return {**figures, "trial_s": round(median(seconds for _, seconds in trials), 1), "problems": problems}


def images(tasks: Sequence[TerminalTask]) -> list[list[TerminalTask]]:
    """Return the tasks in groups that share an image."""
    found: dict[str, list[TerminalTask]] = {}
    for task in tasks:
        found.setdefault(image_of(task), []).append(task)
    return list(found.values())


def play_family(family: str, backend: str) -> dict[str, Any]:
    with TemporaryDirectory(prefix="envkit-family-") as folder:
        commands.export_family(family, range(FAMILY_TASKS), DIFFICULTY, Path(folder))
        for group in images(read_tasks(Path(folder))) if backend == "docker" else ():
            build(group, anew=False)
        return play(Path(folder), FAMILY_TASKS, backend)


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--backend", choices=BACKENDS, action="append", help="play only on this backend; repeatable")
    arguments.add_argument("--task", action="append", help="play only this own task, and no families; repeatable")
    asked = arguments.parse_args()
    backends = asked.backend or BACKENDS
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    own = [task for task in read_tasks(OWN_TASKS) if task.folder.name in (asked.task or [task.folder.name])]
    for group in images(own) if "docker" in backends else ():
        names = ", ".join(task.folder.name for task in group)
        print(names, evidence.part(f"image of {names}", partial(build, group, anew=not asked.task)), flush=True)
    for task in own:
        for backend in backends:
            missing = [name for name in task.programs if shutil.which(name) is None]
            if backend == "local" and (missing or not task.is_portable):
                print(f"{task.name} is not for the local sandbox {missing}", flush=True)
                continue
            call = partial(play, task.folder, 1, backend)
            print(task.name, backend, evidence.part(f"{backend}, {task.folder.name}", call), flush=True)
    for family in () if asked.task else FAMILIES:
        for backend in backends:
            call = partial(play_family, family, backend)
            print(family, backend, evidence.part(f"{backend}, family {family}", call), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
