"""Tasks of Terminal-v0: list, check and export them, and build their images."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from envkit import clock
from envkit.environments.terminal import images
from envkit.environments.terminal.families import FAMILIES, write_drawn
from envkit.environments.terminal.formats import network_uses, read_tasks, task_folders
from envkit.environments.terminal.formats.writing import add_harness
from envkit.environments.terminal.options import OWN_TASKS, TerminalOptions
from envkit.environments.terminal.tasks import TIMEOUT_S, TerminalTask
from envkit.errors import ConfigError, UsageError, did_you_mean
from envkit.sandbox.docker.api import Daemon, DaemonError
from envkit.sandbox.docker.folder_build import build_folder

__all__ = [
    "FAMILIES",
    "Built",
    "Checked",
    "build",
    "check",
    "export",
    "export_family",
    "image_count",
    "tasks_of",
]


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known about the folder of a task.

    Attributes:
        folder: The folder.
        problems: Why the task cannot be read; empty if it can.
        notes: What envkit does not support in the task, and commands of its tests that need the network.
    """

    folder: Path
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Built:
    """An image of tasks.

    Attributes:
        tag: Tag of the image.
        tasks: Names of the tasks that use it.
        seconds: Seconds that the build took; None if the image existed.
    """

    tag: str
    tasks: tuple[str, ...]
    seconds: float | None


def tasks_of(names: Sequence[str] = (), folder: Path | None = None) -> list[TerminalTask]:
    """Return tasks of a folder, by default of envkit's own one.

    Args:
        names: Names of tasks or of their folders; empty for all.
        folder: Folder of tasks or of one task; None for the tasks that envkit has.

    Raises:
        UsageError: There is no task of this name, or there are no tasks.
        ConfigError: A task is malformed.
    """
    tasks = read_tasks(folder or OWN_TASKS)
    known = {one.folder.name: one for one in tasks} | {one.name: one for one in tasks}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no task {name!r}{did_you_mean(name, [one.folder.name for one in tasks])}")
    return [known[name] for name in names] or tasks


def family_tasks() -> list[TerminalTask]:
    """Return a generated task of each family, for its image; the folders of these tasks do not exist."""
    return [replace(TerminalOptions(families=one).task(0), name=f"family {one}") for one in FAMILIES]


def image_count(tasks: Sequence[TerminalTask]) -> int:
    """Return the number of images that the tasks use and that are built from Dockerfiles."""
    return len(_plan(tasks))


def build(
    tasks: Sequence[TerminalTask],
    *,
    base: str | None = None,
    announce: Callable[[str], None],
    on_image: Callable[[Built], None],
) -> list[Built]:
    """Build the images of tasks that do not exist yet, one after the other.

    Args:
        tasks: The tasks.
        base: Base image of Dockerfiles with ``ARG BASE``; None for the default, or without a registry for that of
            ``docker/base-from-debootstrap``.
        announce: Called with lines about progress.
        on_image: Called when an image exists.

    Raises:
        SandboxError: A build failed; the message names the line of the Dockerfile.
        DaemonError: No Docker daemon answers.
    """

    async def main() -> list[Built]:
        done: list[Built] = []
        daemon = await Daemon.connect()
        try:
            for tag, (one, names) in _plan(tasks).items():
                seconds = None
                if await daemon.image(tag) is None:
                    announce(f"building {tag} for {', '.join(names)}")
                    start = clock.now()
                    await build_folder(
                        daemon, tag, one.dockerfile, one.context, base=base, timeout_s=TIMEOUT_S, report=announce
                    )
                    seconds = clock.now() - start
                done.append(Built(tag, tuple(names), seconds))
                on_image(done[-1])
        finally:
            await daemon.close()
        return done

    return clock.run(main)


def check(folder: Path) -> list[Checked]:
    """Read the tasks of a folder, or one task, and report what a user should know about each.

    Of tasks whose images exist on this machine, the images are inspected too.

    Raises:
        UsageError: There are no tasks.
    """
    return clock.run(_check, task_folders(folder))


def export(tasks: Sequence[TerminalTask], folder: Path) -> list[Path]:
    """Copy tasks as folders that Harbor can play, and return these folders.

    Raises:
        UsageError: A folder exists already, or cannot be written.
    """
    made = [folder / task.folder.resolve().name for task in tasks]
    _require_free(made)
    for task, target in zip(tasks, made, strict=True):
        try:
            shutil.copytree(task.folder, target, ignore=shutil.ignore_patterns("__pycache__"))
            for tests in {step.verifier.tests for step in task.steps}:
                add_harness(target / tests.relative_to(task.folder))
        except OSError as error:
            raise UsageError(f"{target}: {error.strerror}; choose a folder that can be written") from None
    return made


def export_family(family: str, seeds: range, difficulty: int, folder: Path) -> Iterator[Path]:
    """Write generated tasks as folders that Harbor can play, and yield these folders.

    Raises:
        UsageError: There is no such family, or a folder exists already.
    """
    if family not in FAMILIES:
        raise UsageError(f"there is no family {family!r}{did_you_mean(family, FAMILIES)}")
    targets = {seed: folder / f"{family}-{difficulty}-{seed}" for seed in seeds}
    _require_free(targets.values())
    for seed, target in targets.items():
        write_drawn(FAMILIES[family], seed, difficulty, target)
        yield target


def _plan(tasks: Sequence[TerminalTask]) -> dict[str, tuple[images.Build, list[str]]]:
    """Return the images of tasks by tag, each with the names of its tasks."""
    found: dict[str, tuple[images.Build, list[str]]] = {}
    for task in tasks:
        for one in images.builds(task):
            found.setdefault(one.tag, (one, []))[1].append(task.name)
    return found


async def _check(folders: Sequence[Path]) -> list[Checked]:
    daemon = None
    with suppress(DaemonError):
        daemon = await Daemon.connect()
    try:
        return [await _checked(one, daemon) for one in folders]
    finally:
        if daemon is not None:
            await daemon.close()


async def _checked(folder: Path, daemon: Daemon | None) -> Checked:
    try:
        (task,) = read_tasks(folder)
    except ConfigError as error:
        return Checked(folder, problems=error.problems)
    notes = list(task.notes)
    if daemon is not None and not task.is_portable and (image := await daemon.image(images.image_of(task))) is not None:
        notes += images.ignored(images.Stage(user=image.user, has_entrypoint=bool(image.entrypoint)))
    notes += [
        f"{use.file.name}:{use.line}: needs the network at grading: {use.command[:80]}" for use in network_uses(task)
    ]
    return Checked(folder, notes=tuple(dict.fromkeys(notes)))


def _require_free(folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder.exists():
            raise UsageError(f"{folder} exists already; choose another folder")
