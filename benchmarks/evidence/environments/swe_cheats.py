"""Play own tasks and a built one of two packages with the oracle, the nop and every cheat, on each backend.

The oracle must succeed, and all others must earn nothing. Cheats whose result may depend on timing play five times.
The times of the built tasks are medians of three: preparation of a sandbox against the start from its snapshot, and
grading against a run of the package's tests in a sandbox that is ready. Docker runs its default image.

    python benchmarks/evidence/environments/swe_cheats.py

Requires bubblewrap, pip with access to a package index, and Docker with the default image or a base. The tasks are
those of `swe_tasks`.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser
from record.players import play
from swe_tasks import make

from envkit import clock
from envkit.environments.swe import Swe
from envkit.environments.swe.checkout import changes_of_patch, source_of
from envkit.environments.swe.grading import grade_changes
from envkit.environments.swe.packages import PYTEST, environment
from envkit.environments.swe.runs import REPO, run_tests, spec_of
from envkit.environments.swe.tasks import SweTask, read_folder
from envkit.wiring import data
from envkit.wiring.sandboxes.backends import open_tool_pool
from envkit_cheats.swe import CHEATS

NAME = "swe-cheats"
STALE_AFTER = ("cheats", "environments/swe", "environments/tasks", "environments/tools", "envkit/checks/tasks.py")
TWIN = "tests/environments/swe/test_cheats.py::test_the_fix_earns_1_and_every_cheat_0"
BACKENDS = ("local", "docker")
PACKAGES = ("hyperframe==6.1.0", "markdown==3.11.3")
OWN, OWN_WITH_CHEATS = 12, 2
"""Numbers of envkit's own tasks that the oracle and the nop play, and that all players play."""
REPEAT = 3


def measure(task: SweTask, folder: Path, cache: Path, backend: str) -> dict[str, Any]:
    """Return medians: preparation and start of an episode in ms, and the tests and their grading in seconds."""
    tests = environment(PYTEST, cache / "environments", print)

    async def main() -> dict[str, Any]:
        tree = await source_of(task, cache)
        fix = changes_of_patch(tree, task.patch)
        times: dict[str, list[float]] = {}

        async def timed(what: str, call: Callable[[], Awaitable[object]]) -> None:
            began = clock.stopwatch()
            await call()
            times.setdefault(what, []).append(clock.stopwatch() - began)

        for _ in range(REPEAT):
            async with open_tool_pool(backend) as pool:
                env = Swe(sandboxes=pool, data={"swe": cache}, tasks=str(folder))
                for what in ("preparation", "start"):
                    await timed(what, partial(env.reset, seed=0, options={}))
                    await env.close()
                async with pool.lease(spec_of(tests)) as sandbox:
                    await sandbox.upload(tree, REPO)
                    await timed("suite", partial(run_tests, sandbox))
                grade = partial(grade_changes, pool, task, tree, fix, environment=tests)
                await timed("grading", grade)
        found = {what: median(seconds) for what, seconds in times.items()}
        return {
            "preparation_ms": round(1000 * found["preparation"]),
            "start_ms": round(1000 * found["start"]),
            "suite_s": round(found["suite"], 2),
            "grading_s": round(found["grading"], 2),
            "grading_limit_s": round(1.5 * found["suite"] + 1, 2),
        }

    return clock.run(main)


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--backend", choices=BACKENDS, action="append", help="play only on this backend; repeatable")
    asked = arguments.parse_args()
    cache = data.folder_of("swe")
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    backends = asked.backend or BACKENDS
    racy = [name for name, cheat in CHEATS.items() if cheat.is_racy]
    checked = partial(play, "SWE-v0", split="any", repeat=REPEAT)

    def part(name: str, call: Callable[[], Any]) -> None:
        print(name, evidence.part(name, call), flush=True)

    for backend in backends:
        own = partial(checked, options={}, backend=backend)
        part(f"{backend}, {OWN} own tasks without cheats", partial(own, OWN, players=["oracle", "nop"]))
        part(f"{backend}, {OWN_WITH_CHEATS} own tasks", partial(own, OWN_WITH_CHEATS, racy=racy))
    for package in PACKAGES:
        folder = cache / "evidence" / package
        make(package, folder, want=1, jobs=1)
        (task, *_), _ = read_folder(folder)
        for backend in backends:
            part(f"{backend}, {package}, times", partial(measure, task, folder, cache, backend))
            built = partial(checked, 1, options={"tasks": str(folder)}, backend=backend, racy=racy)
            part(f"{backend}, {package}, cheats", built)
    return 0


if __name__ == "__main__":
    sys.exit(main())
