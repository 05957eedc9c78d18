"""Commands of ``envkit tasks Terminal-v0``: list and export tasks, and build their images."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from envkit import clock
from envkit.errors import ConfigError, UsageError, did_you_mean
from envkit.runs.printable import counted
from envkit.types import CommandResult, Table

from . import images
from .families import FAMILIES, HELD_OUT, write_drawn
from .formats import is_terminal_bench, read_task, read_tasks, read_terminal_bench, task_folders
from .formats.writing import add_harness
from .options import OWN_TASKS, TerminalOptions
from .tasks import TIMEOUT_S, TerminalTask

_Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Names of tasks; by default all.")]


def ls(
    folder: Annotated[
        Path | None,
        typer.Argument(
            exists=True, file_okay=False, metavar="[DIR]", help="Task, or folder of tasks; by default those of envkit."
        ),
    ] = None,
) -> CommandResult:
    """List tasks, and the families of generated ones. For your own folder, of Harbor or Terminal-Bench 1, also print
    what envkit does not support. Exit with 1 if a task cannot be read.
    """
    rows, lines = list[Sequence[str]](), list[str]()
    folders, unreadable = task_folders(folder or OWN_TASKS), 0
    for one in folders:
        try:
            task = read_terminal_bench(one) if is_terminal_bench(one) else read_task(one)
        except ConfigError as error:
            unreadable += 1
            lines += [f"{one.name}: cannot be read: {problem}" for problem in error.problems]
            continue
        rows.append((one.name, task.difficulty or "-", task.profile, " ".join(task.programs) or "-"))
        lines += [f"{one.name}: {note}" for note in task.notes]
    parts: list[str | Table] = [[("TASK", "DIFFICULTY", "PROFILE", "PROGRAMS"), *rows], *lines]
    if folder is None:
        families = [(one.name, "yes" if one.name in HELD_OUT else "no", one.summary) for one in FAMILIES.values()]
        parts += ["", [("FAMILY", "HELD OUT", "TASKS, DIFFICULTY 1 TO 5"), *families]]
    else:
        parts.append(f"{len(rows)} of {len(folders)} tasks can be read")
    return CommandResult(parts, is_ok=not unreadable)


async def build(
    name: _Names = None,
    *,
    tasks: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, metavar="DIR", help="Folder of tasks; by default those of envkit."),
    ] = None,
    base: Annotated[str | None, typer.Option(metavar="IMAGE", help="Base image of Dockerfiles with ARG BASE.")] = None,
    build_image: Callable[..., Awaitable[bool]],
    announce: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> CommandResult:
    """Build the Docker images that do not exist yet, by default those of envkit's own and generated tasks. A build uses
    the network of this machine.
    """
    chosen = _tasks_of(name or (), tasks)
    if not name and tasks is None:
        chosen += family_tasks()
    plan: dict[str, tuple[images.Build, list[str]]] = {}
    for task in chosen:
        for one in images.builds(task):
            plan.setdefault(one.tag, (one, []))[1].append(task.name)
    rows: list[tuple[str, str, str]] = []
    for tag, (one, names) in plan.items():
        progress(len(rows), len(plan))
        announce(f"{tag}, for {', '.join(names)}")
        start = clock.now()
        is_new = await build_image(tag, one.dockerfile, one.context, base=base, timeout_s=TIMEOUT_S)
        rows.append((tag, f"{clock.now() - start:.1f} s" if is_new else "exists", ", ".join(names)))
    progress(len(rows), len(plan))
    pulled = sorted({task.image for task in chosen if task.image})
    lines = [f"{image} is not built here: docker pull {image}" for image in pulled]
    return CommandResult([[("IMAGE", "BUILD", "TASKS"), *rows], *lines])


def export(
    folder: Annotated[Path, typer.Argument(file_okay=False, metavar="DIR", help="Folder to write.")],
    name: _Names = None,
    *,
    family: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write generated tasks of this family instead.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Seeds of generated tasks, from A to B - 1.", show_default="0:10"),
    ] = None,
    difficulty: Annotated[
        int | None, typer.Option(min=1, max=5, metavar="N", help="Difficulty of generated tasks.", show_default="1")
    ] = None,
) -> CommandResult:
    """Write tasks as folders that Harbor can play."""
    if family is None:
        if seeds is not None or difficulty is not None:
            raise UsageError("--seeds and --difficulty need a family of generated tasks; add --family")
        tasks = _tasks_of(name or ())
        _export(tasks, folder)
        count = len(tasks)
    else:
        if name:
            raise UsageError(f"{name[0]!r}: a task cannot be named with --family; leave out one of them")
        count = len(export_family(family, _range(seeds or "0:10"), difficulty or 1, folder))
    return CommandResult([f"{counted(count, 'task')} in {folder}"])


def family_tasks() -> list[TerminalTask]:
    """Return a generated task of each family, for its image."""
    return [replace(TerminalOptions(families=one).task(0), name=f"family {one}") for one in FAMILIES]


def export_family(family: str, seeds: range, difficulty: int, folder: Path) -> list[Path]:
    """Write generated tasks as folders that Harbor can play, and return these folders."""
    if family not in FAMILIES:
        raise UsageError(f"there is no family {family!r}{did_you_mean(family, FAMILIES)}")
    targets = {seed: folder / f"{family}-{difficulty}-{seed}" for seed in seeds}
    _require_free(targets.values())
    for seed, target in targets.items():
        write_drawn(FAMILIES[family], seed, difficulty, target)
    return list(targets.values())


def _tasks_of(names: Sequence[str] = (), folder: Path | None = None) -> list[TerminalTask]:
    """Return tasks of a folder, by default of envkit's own. `names` are of tasks or their folders; empty for all."""
    tasks = read_tasks(folder or OWN_TASKS)
    known = {one.folder.name: one for one in tasks} | {one.name: one for one in tasks}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no task {name!r}{did_you_mean(name, [one.folder.name for one in tasks])}")
    return [known[name] for name in names] or tasks


def _export(tasks: Sequence[TerminalTask], folder: Path) -> None:
    made = [folder / task.folder.resolve().name for task in tasks]
    _require_free(made)
    for task, target in zip(tasks, made, strict=True):
        try:
            shutil.copytree(task.folder, target, ignore=shutil.ignore_patterns("__pycache__"))
            for tests in {one.verifier.tests for one in (task, *task.later)}:
                add_harness(target / tests.relative_to(task.folder))
        except OSError as error:
            raise UsageError(f"{target}: {error.strerror}; choose a folder that can be written") from None


def _require_free(folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder.exists():
            raise UsageError(f"{folder} exists already; choose another folder")


def _range(text: str) -> range:
    first, colon, end = text.partition(":")
    if not colon or not first.isdecimal() or not end.isdecimal() or int(first) >= int(end):
        raise UsageError(f"--seeds: must be A:B with A < B, such as 0:100; got {text!r}")
    return range(int(first), int(end))
