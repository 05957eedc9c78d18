"""Tasks of SWE-v0: build them, verify them, and grade a patch, with sandboxes of this machine."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio
import msgspec

from envkit import clock
from envkit.environments.swe import formats, packages
from envkit.environments.swe.build import BuildSettings, Yield
from envkit.environments.swe.build import build as build_folder
from envkit.environments.swe.checkout import changes_of_patch, source_of
from envkit.environments.swe.env import OWN_TASKS
from envkit.environments.swe.grading import Verdict, grade_changes
from envkit.environments.swe.tasks import LOCK, TIMEOUT_S, Lock, SweTask, read_folder
from envkit.errors import CapacityError, SandboxError, UsageError, did_you_mean
from envkit.protocols import SandboxPool
from envkit.wiring.data import folder_of
from envkit.wiring.sandboxes.tool_pool import open_tool_pool

DATA = "swe"
"""Name of the data of SWE-v0: source distributions, trees and environments of tests."""
TRIES = 3
"""Maximum number of runs with a task's own fix: tests that measure time may fail on a busy machine."""

Announce = Callable[[str], None]


_WANT = re.compile(r" --want[= ]\d+")


@dataclass(frozen=True, slots=True)
class LocatedTask:
    """A task, the requirements of the environment in which its tests run, and the lock of its folder, if it has one."""

    task: SweTask
    environment: tuple[str, ...]
    lock: Lock | None = None

    @property
    def timeout_s(self) -> float:
        """Maximum seconds of a grading run."""
        return TIMEOUT_S if self.lock is None else self.lock.timeout_s(self.task.base)


@dataclass(frozen=True, slots=True)
class Check:
    """What the two players of `verify` earn in a task.

    Attributes:
        task_id: The task.
        oracle: Whether the task's own fix is accepted.
        nop: Whether the source with the bug is accepted.
        problem: Why the task is not valid; empty if it is.
        note: Why a run with the fix was repeated; empty if the first one succeeded.
    """

    task_id: str
    oracle: bool
    nop: bool
    problem: str
    note: str = ""


def packages_of(words: Sequence[str]) -> list[str]:
    """Return the packages that arguments of the command line name; ``named`` and ``own`` stand for lists."""
    found: dict[str, None] = {}
    for word in words:
        found.update(dict.fromkeys(packages.NAMED if word == "named" else [packages.OWN if word == "own" else word]))
    return list(found)


def named() -> list[tuple[str, Sequence[str] | None]]:
    """Return pairs of each named package and what its tests need besides pytest; None for the one that envkit has."""
    return [(packages.OWN, None), *packages.NAMED.items()]


def build(
    requirements: Sequence[str],
    folder: Path,
    *,
    want: int,
    combine: int = 1,
    seed: int = 0,
    jobs: int = 2,
    more: Sequence[str] = (),
    command: str = "envkit swe build",
    backend: str = "auto",
    announce: Announce,
    on_task: Callable[[str, int], None],
) -> list[Yield]:
    """Make a folder with tasks; see `envkit.environments.swe.build.build` and `BuildSettings` there.

    Raises:
        UsageError: As there; or the folder cannot be written, or has tasks of another command. Only the number of tasks
            may differ.
    """
    _claim(folder, command)
    settings = BuildSettings(want=want, combine=combine, seed=seed, jobs=jobs, more=tuple(more), command=command)

    async def main() -> list[Yield]:
        async with open_tool_pool(backend, announce=announce) as pool:
            data = folder_of(DATA)
            return await build_folder(
                pool, requirements, folder, data=data, settings=settings, announce=announce, on_task=on_task
            )

    return clock.run(main)


def _claim(folder: Path, command: str) -> None:
    """Check that a command may make or continue the tasks in a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; choose a folder that can be written") from None
    if (folder / LOCK).is_file():
        before = msgspec.json.decode(
            (folder / LOCK).read_bytes(), type=Lock
        ).command  # `read_folder` keeps what it read
        if before and _WANT.sub("", before) != _WANT.sub("", command):
            raise UsageError(f"{folder} has the tasks of another command, `{before}`; choose another folder")


def read_tasks(path: Path) -> list[LocatedTask]:
    """Return the tasks of a folder, or of a file with rows of a data set; see `envkit.environments.swe.formats`.

    Raises:
        UsageError: The folder or file cannot be read.
        ConfigError: A row is malformed.
    """
    if path.is_dir():
        tasks, lock = read_folder(path)
        return [LocatedTask(task, lock.environment, lock) for task in tasks]
    rows = formats.read_tasks(path)
    bases = [[packages.requirement_of(task.base)] if task.base else [] for task in rows]
    return [LocatedTask(task, packages.environment_of(base)) for task, base in zip(rows, bases, strict=True)]


def import_tasks(file: Path, folder: Path, *, command: str, strict: bool = False) -> list[SweTask]:
    """Write a folder with the tasks of another data set; see `envkit.environments.swe.formats.write_folder_of`."""
    return formats.write_folder_of(file, folder, data=folder_of(DATA), command=command, strict=strict)


def find_task(path: Path | None, task_id: str) -> LocatedTask:
    """Return a task of `read_tasks` by its id; None for `path` means the tasks that envkit has.

    Raises:
        UsageError: There is no such task.
    """
    path = path or OWN_TASKS
    known = {one.task.id: one for one in read_tasks(path)}
    if task_id not in known:
        raise UsageError(f"{path} has no task {task_id!r}{did_you_mean(task_id, known)}")
    return known[task_id]


def grade(located: LocatedTask, patch: str, *, backend: str = "auto", announce: Announce) -> Verdict:
    """Return the verdict on a patch.

    Raises:
        UsageError: The patch does not apply.
    """

    async def main() -> Verdict:
        async with open_tool_pool(backend, announce=announce) as pool:
            environment = await _prepare(located, announce)
            tree = await source_of(located.task, folder_of(DATA), located.lock)
            changes = await clock.to_thread(changes_of_patch, tree, patch)
            grader = partial(
                grade_changes, pool, located.task, tree, environment=environment, timeout_s=located.timeout_s
            )
            return await _graded(grader, changes)

    return clock.run(main)


async def _graded(
    grader: Callable[[Mapping[str, bytes]], Awaitable[Verdict]], changes: Mapping[str, bytes | None]
) -> Verdict:
    """Return the verdict on the changes of a patch, of which the deletions are listed as refused."""
    taken = {path: content for path, content in changes.items() if content is not None}
    verdict = await grader(taken)
    deleted = dict.fromkeys(sorted(changes.keys() - taken.keys()), "a deletion")
    return replace(verdict, refused={**verdict.refused, **deleted})


def verify(
    located: Sequence[LocatedTask],
    *,
    jobs: int = 2,
    backend: str = "auto",
    announce: Announce,
    on_check: Callable[[Check], None],
) -> list[Check]:
    """Grade each task's own fix, which must succeed, and the source with the bug, which must fail.

    Args:
        located: The tasks.
        jobs: Number of tasks at once.
        backend: Kind of the sandboxes.
        announce: Called with lines about progress.
        on_check: Called when a task has been checked.

    Raises:
        UsageError: pip cannot fetch a source distribution or what tests need.
    """

    async def main() -> list[Check]:
        checks: list[Check] = []
        async with open_tool_pool(backend, announce=announce) as pool:
            environments: dict[tuple[str, ...], Path] = {}
            for base, one in {one.task.base: one for one in located}.items():
                environments[one.environment] = await _prepare(one, announce)
                if base:
                    await clock.to_thread(packages.fetch, packages.requirement_of(base), folder_of(DATA) / "sdists")
            places = anyio.Semaphore(jobs)

            async def check(one: LocatedTask) -> None:
                async with places:
                    checks.append(await _check(pool, one, environments[one.environment]))
                on_check(checks[-1])

            async with anyio.create_task_group() as tasks:
                for one in located:
                    tasks.start_soon(check, one)
        return checks

    return clock.run(main)


async def _check(pool: SandboxPool, located: LocatedTask, environment: Path) -> Check:
    task = located.task
    try:
        tree = await source_of(task, folder_of(DATA), located.lock)
        fix = await clock.to_thread(changes_of_patch, tree, task.patch)
    except UsageError as error:
        return Check(task.id, oracle=False, nop=False, problem=str(error))
    grader = partial(grade_changes, pool, task, tree, environment=environment, timeout_s=located.timeout_s)
    note = problem = ""
    try:
        for _ in range(TRIES):
            note, oracle = problem, await _graded(grader, fix)
            problem = _why_wrong(oracle)
            if not problem:
                break
        nop = await grader({})
    except (SandboxError, CapacityError) as error:
        return Check(task.id, oracle=False, nop=False, problem=f"no verdict: {error}")
    if nop.resolved:
        problem = problem or "nop: the tests pass with the bug"
    return Check(task.id, oracle.resolved, nop.resolved, problem, note)


def _why_wrong(oracle: Verdict) -> str:
    """Return why a fix was not accepted; empty if it was."""
    if oracle.resolved:
        return ""
    failed = [f"{test} ({result.outcome})" for test, result in oracle.tests.items() if not result.is_ok]
    refused = [f"{path} was refused: {why}" for path, why in oracle.refused.items()]
    tests = [f"{len(failed)} tests do not pass, first {failed[0]}"] if failed else []
    return f"oracle: {'; '.join([*filter(None, [oracle.problem]), *refused, *tests])}"


async def _prepare(located: LocatedTask, announce: Announce) -> Path:
    """Return the folder of the environment in which the tests of a task run."""
    folder = folder_of(DATA) / "environments"
    return await clock.to_thread(packages.environment, located.environment, folder, announce)
