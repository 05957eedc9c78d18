"""Build the images of Terminal-v0's own tasks, and play all tasks with the oracle, the nop and every cheat.

The oracle must earn 1, and the nop and every cheat 0: in Docker for all own tasks, and in the local sandbox for those
whose programs this machine has. The same holds for two tasks of each family. A trial is an episode of the oracle with
the verification and the pool's start; the figure is the median of three.

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
from record.players import play

from envkit import clock
from envkit.environments.terminal import commands
from envkit.environments.terminal.families import FAMILIES
from envkit.environments.terminal.formats import read_tasks
from envkit.environments.terminal.images import image_of
from envkit.environments.terminal.options import OWN_TASKS
from envkit.environments.terminal.tasks import TerminalTask
from envkit.runs.display import SilentDisplay
from envkit.types import JSON
from envkit.wiring.commands import run
from envkit.wiring.environments import find
from envkit_cheats.terminal import CHEATS

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
TRIALS, FAMILY_TASKS, DIFFICULTY = 3, 2, 2


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


def check(folder: Path, count: int, backend: str) -> dict[str, Any]:
    """Play the tasks of a folder with all players, and then with the oracle alone to measure trials."""
    options: dict[str, JSON] = {"tasks": str(folder), "image": "task" if backend == "docker" else None}
    call = partial(play, ENV_ID, options=options, repeat=1, backend=backend)
    racy = [name for name, cheat in CHEATS.items() if cheat.is_racy]
    figures = call(range(count), racy=racy)
    trials = [call([number % count], players=["oracle"]) for number in range(TRIALS)]
    problems = [*figures["problems"], *(line for one in trials for line in one["problems"])]
    return {**figures, "trial_s": median(one["seconds"] for one in trials), "problems": problems}


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
        return check(Path(folder), FAMILY_TASKS, backend)


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
            call = partial(check, task.folder, 1, backend)
            print(task.name, backend, evidence.part(f"{backend}, {task.folder.name}", call), flush=True)
    for family in () if asked.task else FAMILIES:
        for backend in backends:
            call = partial(play_family, family, backend)
            print(family, backend, evidence.part(f"{backend}, family {family}", call), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
