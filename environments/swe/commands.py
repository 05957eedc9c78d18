"""Commands of ``envkit tasks SWE-v0``: make tasks, and grade a patch."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from envkit import clock
from envkit.errors import UsageError, did_you_mean
from envkit.protocols import SandboxPool
from envkit.types import CommandResult

from . import build as building
from . import packages
from .checkout import changes_of_patch, source_of
from .env import OWN_TASKS
from .grading import grade_changes
from .tasks import LOCK, Lock, read_folder

_COMMAND = "envkit tasks SWE-v0"
_WANT = re.compile(r" --want[= ]\d+")


def list_packages() -> CommandResult:
    """List the packages that `build named` uses: their tests pass, and pip fetches them on demand."""
    named = [(name, " ".join(needs)) for name, needs in packages.TESTED_PACKAGES.items()]
    return CommandResult([[("PACKAGE", "TESTS NEED"), (packages.OWN, "(part of envkit)"), *named]])


async def build(
    package: Annotated[
        list[str],
        typer.Argument(
            metavar="PACKAGE==VERSION...",
            help="Packages; `named`: all that the command packages lists; `own`: the one of envkit.",
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(file_okay=False, metavar="DIR", help="Folder to make or continue.")],
    want: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Number of tasks of each package.")] = 10,
    combine: Annotated[int, typer.Option(min=1, max=5, metavar="COUNT", help="Largest number of bugs of a task.")] = 1,
    seed: Annotated[int, typer.Option(metavar="SEED", help="Chooses the bugs.")] = 0,
    more: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="PACKAGE==VERSION", help="Package that the tests import; repeatable."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Number of test runs at once.")] = 2,
    sandboxes: SandboxPool,
    data: Mapping[str, Path],
    announce: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> CommandResult:
    """Make tasks: put bugs into packages, and keep those that the packages' own tests find.

    The folder gets the tasks and a lock file. If the command is interrupted, run it again: it continues.
    """
    words = [*package, f"--want={want}", f"--combine={combine}", f"--seed={seed}"]
    command = f"{_COMMAND} build {shlex.join([*words, *(f'--with={one}' for one in more or ())])}"
    _claim(out, command)
    chosen = _packages_of(package)
    done: dict[str, int] = {}

    def on_task(name: str, count: int) -> None:
        done[name] = count
        progress(sum(done.values()), want * len(chosen))

    reports = await building.build(
        sandboxes,
        chosen,
        out,
        data=data["swe"],
        settings=building.BuildSettings(
            want=want, combine=combine, seed=seed, jobs=jobs, more=tuple(more or ()), command=command
        ),
        announce=announce,
        on_task=on_task,
    )
    rows = [
        (
            one.package,
            str(one.tasks),
            f"{one.seconds / max(1, one.tasks):.1f}",
            ", ".join(f"{count} {verdict}" for verdict, count in sorted(one.tried.items())),
        )
        for one in reports
    ]
    table = [("PACKAGE", "TASKS", "S/TASK", "TRIED"), *rows]
    return CommandResult([table, f"{sum(one.tasks for one in reports)} tasks in {out}"])


async def grade(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Id of a task.")],
    patch: Annotated[
        str, typer.Argument(metavar="PATCH", help="File with a diff of the package; - for standard input.")
    ],
    *,
    tasks: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, metavar="DIR", help="Folder of tasks; by default those of envkit."),
    ] = None,
    sandboxes: SandboxPool,
    data: Mapping[str, Path],
    announce: Callable[[str], None],
) -> CommandResult:
    """Grade a patch: print the result of each test that counts, and the verdict. Exit with 1 if it is not resolved."""
    content = _read(patch)
    folder = tasks or OWN_TASKS
    listed, lock = read_folder(folder)
    known = {one.id: one for one in listed}
    if task not in known:
        raise UsageError(f"{folder} has no task {task!r}{did_you_mean(task, known)}")
    chosen = known[task]
    environment = await clock.to_thread(packages.environment, lock.environment, data["swe"] / "environments", announce)
    tree = await source_of(chosen, data["swe"], lock)
    changes = await clock.to_thread(changes_of_patch, tree, content)
    timeout_s = lock.timeout_s(chosen.base)
    verdict = await grade_changes(sandboxes, chosen, tree, changes, environment=environment, timeout_s=timeout_s)
    rows = [(one.kind, one.outcome, test) for test, one in verdict.tests.items()]
    lines = [f"refused: {path}: {why}" for path, why in verdict.refused.items()]
    lines += [f"to review: {flag}" for flag in verdict.flags]
    lines += [f"the run is not valid: {verdict.problem}"] if verdict.problem else []
    passed = sum(one.is_ok for one in verdict.tests.values())
    end = f"{'resolved' if verdict.resolved else 'not resolved'}: {passed} of {len(verdict.tests)} tests pass"
    return CommandResult([[("KIND", "OUTCOME", "TEST"), *rows], *lines, end], is_ok=verdict.resolved)


def _read(patch: str) -> str:
    try:
        return sys.stdin.read() if patch == "-" else Path(patch).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the patch {patch}: {error}") from None


def _packages_of(words: Sequence[str]) -> list[str]:
    """Return the packages that arguments name; ``named`` and ``own`` stand for lists."""
    lists: Mapping[str, Collection[str]] = {"named": packages.TESTED_PACKAGES, "own": (packages.OWN,)}
    return list(dict.fromkeys(one for word in words for one in lists.get(word, (word,))))


def _claim(folder: Path, command: str) -> None:
    """Check that a command may write to a folder: that it is new, or was made by the same command but for --want."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; choose a folder that can be written") from None
    if (folder / LOCK).is_file():
        # `read_folder` would cache the rows
        before = msgspec.json.decode((folder / LOCK).read_bytes(), type=Lock).command
        old, new = (_WANT.sub("", one.partition(" build ")[2]) for one in (before, command))
        if before and old != new:
            raise UsageError(f"{folder} has the tasks of another command, `{before}`; choose another folder")
