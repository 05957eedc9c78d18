"""Make tasks of SWE-v0 from 17 packages, and verify each: the fix must be resolved, and the bug must not.

Up to four tasks of each package, half of them with two bugs. pip fetches the packages. The second half of each part
reads the folder of tasks again, as a user does, and grades the oracle and the nop of every task.

    python benchmarks/evidence/environments/swe_tasks.py --jobs 1

Requires bubblewrap and a package index. On an idle core it takes about 45 minutes. An interrupted run continues with
the bug at which it ended: the folders of tasks are in the cache folder of envkit, below ``data/swe/evidence``.
"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser
from record.players import play

from envkit import clock
from envkit.environments.swe.build import BuildReport, BuildSettings, build
from envkit.environments.swe.tasks import read_folder
from envkit.wiring.data import folder_of
from envkit.wiring.sandboxes.backends import open_tool_pool

NAME = "swe-tasks"
STALE_AFTER = (
    "environments/swe/build.py",
    "environments/swe/grading.py",
    "environments/swe/mutate.py",
    "environments/swe/report_plugin.py",
    "environments/swe/runs.py",
    "environments/swe/statements.py",
)
TWIN = "tests/environments/swe/test_build.py::test_a_build_makes_today_the_first_tasks_of_our_own_package"
PACKAGES = (
    *("hyperframe==6.1.0", "pyasn1==0.6.1", "markdown==3.11.3", "webob==1.8.11", "wtforms==3.3.2"),
    *("cachetools==8.0.0", "semver==3.1.1", "voluptuous==0.16.0", "toolz==1.2.0", "tabulate==0.10.0"),
    *("sqlparse==0.6.1", "boltons==26.2.0", "inflection==0.5.1", "xmltodict==1.0.4", "itsdangerous==2.2.0"),
    *("parse==1.22.4", "h11==0.16.0"),
)
NEEDS = {"wtforms==3.3.2": ("markupsafe==3.0.3",)}
"""What the tests of packages import besides pytest."""
TASKS, BUGS = 4, 2


def log(line: str) -> None:
    print(line, flush=True)


def make(package: str, folder: Path, want: int, jobs: int) -> BuildReport:
    """Make the tasks of a package, or continue to."""

    async def main() -> list[BuildReport]:
        settings = BuildSettings(want=want, combine=BUGS, jobs=jobs, more=NEEDS.get(package, ()))
        async with open_tool_pool() as pool:
            return await build(pool, [package], folder, data=folder_of("swe"), settings=settings, announce=log)

    (made,) = clock.run(main)
    return made


def measure(package: str, folder: Path, want: int, jobs: int, backend: str | None) -> dict[str, Any]:
    """Make and verify the tasks of a package, and return the figures."""
    made = make(package, folder, want, jobs)
    tasks, lock = read_folder(folder)
    options = {"tasks": str(folder)}
    played = play("SWE-v0", 0, split="any", players=["oracle", "nop"], repeat=1, options=options, backend=backend)
    failing = sorted(len(task.fail_to_pass) for task in tasks)
    assert {task.base for task in tasks} == {lock.packages[0].base}
    return {
        "tasks": len(tasks),
        "oracle": played["oracle"]["successes"],
        "nop": played["nop"]["successes"],
        "problems": played["problems"],
        "stable_tests": lock.packages[0].tests,
        "licence": lock.packages[0].licence,
        "suite_s": lock.packages[0].suite_s,
        "tried": dict(sorted(made.tried.items())),
        "yield": round(made.tried.get("accepted", 0) / sum(made.tried.values()), 2),
        "seconds_per_task": round(made.seconds / max(1, made.tasks), 1),
        "failing_tests_median": failing[len(failing) // 2],
        "tasks_with_two_bugs": sum("+" in task.strategy for task in tasks),
    }


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--backend", help="plays the tasks; docker if a package is installed here")
    arguments.add_argument("--package", choices=PACKAGES, action="append", help="only this package; repeatable")
    arguments.add_argument("--tasks", type=int, default=TASKS, help="number of tasks of each package")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    folders = folder_of("swe") / "evidence"
    if asked.fresh:
        shutil.rmtree(folders, ignore_errors=True)
    parts = []
    for package in asked.package or PACKAGES:
        folder = folders / package
        parts.append(evidence.part(package, partial(measure, package, folder, asked.tasks, asked.jobs, asked.backend)))
        print(package, parts[-1], flush=True)
    total = {key: sum(part[key] for part in parts) for key in ("tasks", "oracle", "nop", "tasks_with_two_bugs")}
    tried = sum(sum(part["tried"].values()) for part in parts)
    seconds = sum(part["seconds_per_task"] * part["tasks"] for part in parts)
    total["yield"] = round(total["tasks"] / tried, 2)
    total["seconds_per_task"] = round(seconds / total["tasks"], 1)
    print("all", evidence.part("all packages", lambda: total), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
