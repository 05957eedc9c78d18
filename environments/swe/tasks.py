"""Tasks: a package with a bug, the tests that show it, and folders of tasks with the versions of all that they need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from envkit.errors import ConfigError, UsageError

TASKS = "tasks.jsonl"
LOCK = "lock.json"
TIMEOUT_S = 600.0
"""Maximum seconds of a grading run if the package's tests were not timed."""


class SweTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A bug to fix.

    Attributes:
        id: Name of the task, unique in its folder. It has no slashes and spaces, because reviews use it as a file name.
        repo: Name of the package or repository.
        base: File name of the source distribution with the package without the bug, such as ``semver-3.1.1.tar.gz``.
        bug_patch: Diff that adds the bug.
        patch: Diff that fixes the bug.
        fail_to_pass: Ids of the tests that fail with the bug, and pass without it.
        pass_to_pass: Ids of the tests that pass with and without it.
        statements: Texts of the issue by level, from much help to little; at least one.
        file: Path of the file with the bug.
        function: Qualified name of the function with the bug.
        strategy: How the bug was made, such as ``compare_flip``.
        level: Difficulty of the bug: how many places of the source it changes.
    """

    id: str
    repo: str
    base: str
    bug_patch: str
    patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    statements: tuple[str, ...]
    file: str
    function: str
    strategy: str = ""
    level: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+@:-]{1,200}", self.id):
            raise ValueError(f"the id must be 1 to 200 letters, digits or any of ._+@:-, got {self.id[:200]!r}")

    @property
    def test_files(self) -> frozenset[str]:
        """Paths of the files with the tests that fail with the bug."""
        return frozenset(test.partition("::")[0] for test in self.fail_to_pass)


class LockedPackage(msgspec.Struct, frozen=True, kw_only=True):
    """A source distribution that tasks are made of.

    Attributes:
        requirement: What pip downloads, such as ``semver==3.1.1``; empty for a package that envkit contains.
        base: File name of the source distribution.
        sha256: Hash of that file; empty for a package that envkit contains.
        licence: Licence that its metadata names.
        tests: Number of stable tests of the package without a bug.
        suite_s: Seconds that all tests took on the machine that made the tasks.
    """

    requirement: str
    base: str
    sha256: str
    licence: str
    tests: int
    suite_s: float


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """The requirements of a folder of tasks, with exact versions in `environment`, and the command that made it."""

    format: int = 1
    command: str
    environment: tuple[str, ...]
    packages: tuple[LockedPackage, ...]

    def timeout_s(self, base: str) -> float:
        """Return the maximum seconds of a grading run, given the name of the source distribution."""
        suites = [package.suite_s for package in self.packages if package.base == base]
        return 20 + 4 * suites[0] if suites and suites[0] else TIMEOUT_S


# msgspec prepares a type at its first use; if two threads do that at once, the process crashes. So prepare it now.
msgspec.json.Decoder(tuple[SweTask, Lock])


@lru_cache(maxsize=8)
def read_folder(folder: Path) -> tuple[Sequence[SweTask], Lock]:
    """Return the tasks of a folder that ``envkit tasks SWE-v0 build`` made, and its lock.

    Raises:
        UsageError: The folder does not have these files.
        ConfigError: A file is malformed; the message names the line.
    """
    try:
        lock = msgspec.json.decode((folder / LOCK).read_bytes(), type=Lock)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} has no usable {LOCK}: {error}; make the folder with: envkit tasks SWE-v0 build"
        ) from None
    try:
        lines = (folder / TASKS).read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read {folder / TASKS}: {error}") from None
    tasks: list[SweTask] = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                tasks.append(msgspec.json.decode(line, type=SweTask))
        except (ValueError, RecursionError) as error:  # also text that is not UTF-8
            raise ConfigError([f"{folder / TASKS}:{number}: {error}"]) from None
    if not tasks:
        raise UsageError(f"{folder / TASKS} has no tasks")
    return tasks, lock


def write_folder(folder: Path, tasks: Iterable[SweTask], lock: Lock) -> None:
    """Write a folder that `read_folder` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TASKS).write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))
    (folder / LOCK).write_bytes(msgspec.json.format(msgspec.json.encode(lock), indent=1) + b"\n")
