"""Folders of tasks of other data sets."""

from __future__ import annotations

from pathlib import Path

from envkit.errors import ConfigError

from ..packages import PYTEST, requirement_of
from ..tasks import Lock, LockedPackage, SweTask, write_folder
from .rows import read_tasks


def write_folder_of(file: Path, folder: Path, *, command: str) -> list[SweTask]:
    """Write the tasks of a file as a folder that `envkit.environments.swe.tasks.read_folder` reads, and return them.

    The lock has the source distributions of tasks that need one, with empty hashes and licences: they are not fetched.

    Args:
        file: Rows that `read_tasks` reads.
        folder: The folder to write.
        command: The command line, for the lock.

    Raises:
        UsageError: The file cannot be read.
        ConfigError: A row is malformed, or two rows have the same id.
    """
    tasks = list(read_tasks(file))
    known: set[str] = set()
    for number, task in enumerate(tasks, 1):
        if task.id in known:
            raise ConfigError([f"{file}: row {number}: the id {task.id!r} occurs twice"])
        known.add(task.id)
    bases = sorted({task.base for task in tasks if task.base})
    packages = tuple(
        LockedPackage(requirement=requirement_of(base), base=base, sha256="", licence="", tests=0, suite_s=0.0)
        for base in bases
    )
    write_folder(folder, tasks, Lock(command=command, environment=PYTEST if bases else (), packages=packages))
    return tasks
