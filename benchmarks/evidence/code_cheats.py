"""Play 30 programming tasks of levels 1 to 6 with the oracle, the nop and every cheat, in both modes, on each backend.

The oracle must succeed in all of its 20 episodes per task, and the others must earn nothing. Cheats whose result may
depend on timing play each task 5 times.

    python benchmarks/evidence/code_cheats.py

Requires bubblewrap, and for Docker the image ``envkit/base:bookworm``. A part of five tasks takes about a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from record import Evidence, parser

from envkit import clock
from envkit.checks.tasks import check_tasks
from envkit.environments.code import Code, CodeTasks
from envkit.registry import register
from envkit.types import JSON
from envkit.wiring.environments import find
from envkit_cheats.code import CHEATS
from tests.sandbox.containers import image

NAME = "code-cheats"
STALE_AFTER = ("cheats", "environments/code", "environments/tasks", "environments/tools", "envkit/checks/tasks.py")
TWIN = "tests/environments/code/test_cheats.py::test_the_oracle_earns_1_and_every_cheat_0"
BACKENDS = ("local", "docker")
MODES = ("answer", "tools")
TASKS = 30
PER_PART = 5
REPEAT = 20
RACES = 5
"""Episodes per task of a cheat whose result may depend on timing."""
ENV_ID = "CodeCheats-v0"
"""Code-v0, where such a cheat is several players, named ``cheat:NAME:NUMBER``."""


def register_races() -> None:
    racy = {name: cheat for name, cheat in CHEATS.items() if cheat.is_racy}
    races = Code.cheats({f"{name}:{number}": one for name, one in racy.items() for number in range(2, RACES + 1)})
    players = {**find("Code-v0").players, **races}
    register(ENV_ID, Code, needs={"sandbox"}, replayable=False, players=players, task_set=CodeTasks)


def play(backend: str, mode: str, indices: Sequence[int]) -> dict[str, Any]:
    """Play tasks, and return the episodes and successes of each kind of player."""
    began = clock.stopwatch()
    options: dict[str, JSON] = {"mode": mode, "level": [1, 6], "image": image() if backend == "docker" else None}
    results, _ = check_tasks(ENV_ID, indices, repeat=REPEAT, options=options, backend=backend)
    figures: dict[str, Any] = {}
    for one in results:
        kind_name, *name = one.player.split(":")
        kind = figures.setdefault(kind_name, {"players": 0, "episodes": 0, "successes": 0})
        kind["players"] += len(name) < 2
        kind["episodes"] += len(one.episodes)
        kind["successes"] += one.successes
    problems = [line for one in results for line in one.problems()]
    return {**figures, "problems": problems, "seconds": round(clock.stopwatch() - began)}


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--backend", choices=BACKENDS, action="append", help="play only on this backend; repeatable")
    arguments.add_argument("--tasks", type=int, default=TASKS, help=f"number of tasks, a multiple of {PER_PART}")
    asked = arguments.parse_args()
    register_races()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    for backend in asked.backend or BACKENDS:
        for first in range(0, asked.tasks, PER_PART):
            for mode in MODES:
                part = f"{backend}, {mode}, tasks {first} to {first + PER_PART - 1}"
                figures = evidence.part(part, partial(play, backend, mode, range(first, first + PER_PART)))
                print(part, figures, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
