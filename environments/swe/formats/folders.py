"""Folders of tasks of other data sets."""

from __future__ import annotations

from pathlib import Path

from .. import packages
from ..tasks import Lock, LockedPackage, SweTask, write_folder
from .rows import read_tasks


def write_folder_of(file: Path, folder: Path, *, data: Path, command: str, strict: bool = False) -> list[SweTask]:
    """Write the tasks of a file as a folder that `envkit.environments.swe.tasks.read_folder` reads, and return them.

    Args:
        file: Rows that `read_tasks` reads.
        folder: The folder to write.
        data: Folder in which source distributions and trees are cached. pip downloads those that are missing.
        command: The command line, for the lock.
        strict: See `read_tasks`.

    Raises:
        UsageError: The file cannot be read, or pip failed.
        ConfigError: See `read_tasks`.
    """
    tasks = list(read_tasks(file, strict=strict))
    requirements = [packages.requirement_of(base) for base in sorted({task.base for task in tasks if task.base})]
    environment = packages.environment_of(requirements)
    locked = tuple(_locked(one, data) for one in requirements)
    write_folder(folder, tasks, Lock(command=command, environment=environment, packages=locked))
    return tasks


def _locked(requirement: str, data: Path) -> LockedPackage:
    base = packages.fetch(requirement, data / "sdists")
    return LockedPackage(
        requirement=requirement,
        base=base.name,
        sha256=packages.sha256_of(base),
        licence=packages.licence_of(packages.unpack(base, data / "trees")),
        tests=0,
        suite_s=0.0,
    )
