"""Play one task of two packages with the oracle, the nop and every cheat, on each backend, and measure their times.

The oracle must succeed, and all others must earn nothing. Cheats whose result may depend on timing play five times.
The times are medians of five: preparation of a sandbox against the start from its snapshot, and grading against a run
of the package's tests in a sandbox that is ready.

    python benchmarks/evidence/environments/swe_cheats.py

Requires bubblewrap, pip with access to a package index, and for Docker the image ``envkit/base:bookworm``.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
import msgspec
from record import Evidence, parser

from envkit import clock
from envkit.checks.tasks import check_tasks
from envkit.environments.swe import Swe, SweTasks
from envkit.environments.swe.checkout import changes_of_patch, diff_of, source_of
from envkit.environments.swe.grading import grade_changes
from envkit.environments.swe.packages import PYTEST, environment, fetch, sha256_of, unpack
from envkit.environments.swe.runs import REPO, TestRun, run_tests, spec_of
from envkit.environments.swe.tasks import Lock, LockedPackage, SweTask, write_folder
from envkit.registry import register
from envkit.types import JSON
from envkit.wiring import data
from envkit.wiring.environments import find
from envkit.wiring.sandboxes.tool_pool import open_tool_pool
from envkit_cheats.swe import CHEATS
from tests.sandbox.containers import image

NAME = "swe-cheats"
STALE_AFTER = ("cheats", "environments/swe", "environments/tasks", "environments/tools", "envkit/checks/tasks.py")
TWIN = "tests/environments/swe/test_cheats.py::test_the_fix_earns_1_and_every_cheat_0"
BACKENDS = ("local", "docker")
BUGS = {
    "semver==3.1.1": ("src/semver/version.py", "return self.compare(other) >= 0", "return self.compare(other) > 0"),
    "cachetools==8.0.0": ("src/cachetools/__init__.py", "if itemsize > maxsize:", "if itemsize >= maxsize:"),
}
"""The bug of each package: the file, and the text that is replaced once."""
RACES = 5
REPEAT = 5
ENV_ID = "SweCheats-v0"
"""SWE-v0, where a cheat whose result may depend on timing is several players, named ``cheat:NAME:NUMBER``."""


def register_races() -> None:
    racy = {name: cheat for name, cheat in CHEATS.items() if cheat.is_racy}
    races = Swe.cheats({f"{name}:{number}": one for name, one in racy.items() for number in range(2, RACES + 1)})
    spec = find("SWE-v0")
    players = {**spec.players, **races}
    register(ENV_ID, Swe, needs={"sandbox"}, replayable=False, players=players, task_set=SweTasks, data=dict(spec.data))


def task_of(requirement: str, cache: Path, tests: Path) -> SweTask:
    """Return the task of a package, whose lists of tests come from runs with and without the bug."""
    file, old, new = BUGS[requirement]
    base = fetch(requirement, cache / "sdists")
    tree = unpack(base, cache / "trees")
    source = (tree / file).read_bytes()
    buggy = source.replace(old.encode(), new.encode(), 1)

    async def run(content: bytes) -> TestRun:
        async with open_tool_pool("local") as pool, pool.lease(spec_of(tests)) as sandbox:
            await sandbox.upload(tree, REPO)
            await sandbox.write(f"{REPO}/{file}", content)
            return await run_tests(sandbox)

    with_bug, without = (clock.run(partial(run, content)).passed for content in (buggy, source))
    patch = diff_of(tree, {file: buggy})
    task = SweTask(
        id=requirement.replace("==", "-"),
        repo=requirement.partition("==")[0],
        base=base.name,
        bug_patch=patch,
        fail_to_pass=tuple(sorted(without - with_bug)),
        pass_to_pass=tuple(sorted(without & with_bug)),
        statements=("A comparison is wrong.",),
        file=file,
    )
    fixed = diff_of(clock.run(partial(source_of, task, cache)), {file: source})
    return msgspec.structs.replace(task, patch=fixed)


def make(requirement: str, cache: Path, folder: Path) -> SweTask:
    tests = environment(PYTEST, cache / "environments", print)
    task = task_of(requirement, cache, tests)
    package = LockedPackage(
        requirement=requirement,
        base=task.base,
        sha256=sha256_of(cache / "sdists" / task.base),
        licence="",
        tests=len(task.fail_to_pass) + len(task.pass_to_pass),
        suite_s=3.0,
    )
    write_folder(folder, [task], Lock(command="", environment=PYTEST, packages=(package,)))
    return task


def play(folder: Path, backend: str) -> dict[str, Any]:
    """Play the task of a folder, and return the episodes and successes of each kind of player."""
    began = clock.stopwatch()
    options: dict[str, JSON] = {"tasks": str(folder), "image": image() if backend == "docker" else None}
    results, _ = check_tasks(ENV_ID, [0], repeat=REPEAT, options=options, backend=backend)
    figures: dict[str, Any] = {}
    for one in results:
        kind_name, *name = one.player.split(":")
        kind = figures.setdefault(kind_name, {"players": 0, "episodes": 0, "successes": 0})
        kind["players"] += len(name) < 2
        kind["episodes"] += len(one.episodes)
        kind["successes"] += one.successes
    problems = [line for one in results for line in one.problems()]
    return {**figures, "problems": problems, "seconds": round(clock.stopwatch() - began)}


def measure(task: SweTask, folder: Path, cache: Path, backend: str) -> dict[str, Any]:
    """Return medians: preparation and start of an episode in ms, and the tests and their grading in seconds."""
    name = image() if backend == "docker" else None
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
                env = Swe(sandboxes=pool, data={"swe": cache}, tasks=str(folder), image=name)
                for what in ("preparation", "start"):
                    await timed(what, partial(env.reset, seed=0, options={}))
                    await env.close()
                async with pool.lease(spec_of(tests, image=name)) as sandbox:
                    await sandbox.upload(tree, REPO)
                    await timed("suite", partial(run_tests, sandbox))
                grade = partial(grade_changes, pool, task, tree, fix, environment=tests, image=name)
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
    register_races()
    cache = data.folder_of("swe")
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    for requirement in BUGS:
        folder = cache / "evidence" / requirement
        task = make(requirement, cache, folder)
        for backend in asked.backend or BACKENDS:
            for what, call in (
                ("times", partial(measure, task, folder, cache, backend)),
                ("cheats", partial(play, folder, backend)),
            ):
                print(requirement, backend, what, evidence.part(f"{backend}, {requirement}, {what}", call), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
