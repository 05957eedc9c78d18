"""Tasks of Terminal-Bench 1: folders with ``task.yaml``, ``Dockerfile``, ``run-tests.sh``, ``tests`` and a solution.

The tests of such a task print a summary of pytest. Its solution and tests are copied into a temporary folder of this
process, in the form that other tasks have.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from envkit.errors import ConfigError, UsageError

from ..images import ignored
from ..tasks import ScratchFolder, TerminalTask, Timeout, Verifier
from .files import read_yaml, require_usable
from .harbor import compose_notes, read_task

_log = logging.getLogger(__name__)
TESTS = "/tests"
"""Folder of the tests in the sandbox, which they find in the variable ``TEST_DIR``."""
_NAMED = 8
"""Maximum number of folders that a warning names."""


class _TaskFile(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of ``task.yaml`` that envkit uses."""

    instruction: str
    difficulty: str = ""
    category: str = ""
    parser_name: str = "pytest"
    max_agent_timeout_sec: Timeout = 360.0
    max_test_timeout_sec: Timeout = 60.0
    run_tests_in_same_shell: bool = False


class _Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command of ``solution.yaml``, typed into a terminal."""

    command: str
    append_enter: bool = True


# msgspec prepares a type at its first use; if two threads do that at once, the process crashes. So prepare it now.
msgspec.json.Decoder(tuple[_TaskFile, _Command])


def read_tasks(folder: Path) -> list[TerminalTask]:
    """Read a task of Harbor or Terminal-Bench 1, or all tasks in the subfolders of a folder, ordered by name.

    Subfolders that are no tasks, or malformed, or that envkit cannot play, are left out with a warning in the log.

    Args:
        folder: The folder.

    Raises:
        UsageError: There are no tasks.
        ConfigError: No task can be used. The message has lines for each.
    """
    tasks, problems = [], list[str]()
    for one in task_folders(folder):
        try:
            tasks.append(read_terminal_bench(one) if is_terminal_bench(one) else read_task(one))
        except ConfigError as error:
            problems.extend(error.problems)
    if not tasks:
        raise ConfigError(problems)
    for line in left_out(folder, tasks):
        _log.warning(line)
    return tasks


def left_out(folder: Path, tasks: Iterable[TerminalTask]) -> Sequence[str]:
    """Return a line that names the subfolders of a folder that are not among its `tasks`, if there are any."""
    folders, used = task_folders(folder), {task.folder for task in tasks}
    names = [one.name for one in folders if one not in used]
    if not names:
        return []
    shown = ", ".join([*names[:_NAMED], *(["..."] if len(names) > _NAMED else [])])
    line = f"left out {len(names):,} of {len(folders):,} folders, which cannot be played ({shown})"
    return [f"{line}; for the reasons: envkit tasks Terminal-v0 ls {folder}"]


def task_folders(folder: Path) -> list[Path]:
    """Return the folder itself if it is a task; otherwise all its subfolders, ordered by name.

    Hidden subfolders and ``__pycache__`` are ignored.

    Raises:
        UsageError: None of them is a task.
    """
    if _is_task(folder):
        return [folder]
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    if not any(map(_is_task, found)):
        raise UsageError(
            f"{folder} has no tasks; choose a folder with task.toml or task.yaml, or one with such folders"
        )
    return found


def is_terminal_bench(folder: Path) -> bool:
    """Return whether a folder is a task of Terminal-Bench 1."""
    return (folder / "task.yaml").is_file() and not (folder / "task.toml").is_file()


def read_terminal_bench(folder: Path) -> TerminalTask:
    """Read a task of Terminal-Bench 1.

    Raises:
        ConfigError: A file is missing or malformed, or envkit cannot play the task. The message names file and key.
    """
    file = folder / "task.yaml"
    require_usable(folder)
    found = read_yaml(file, _TaskFile)
    if found.parser_name != "pytest":
        raise ConfigError([f"{file}: parser_name: envkit reads only summaries of pytest, got {found.parser_name!r}"])
    for name in ("Dockerfile", "run-tests.sh"):
        if not (folder / name).is_file():
            raise ConfigError([f"{file}: {folder / name} is missing"])
    compose = folder / "docker-compose.yaml"
    notes = compose_notes(compose) if compose.is_file() else []
    notes = [note for note in notes if not note.endswith((": environment: is ignored", ": volumes: is ignored"))]
    notes.extend(ignored(folder / "Dockerfile"))
    if found.run_tests_in_same_shell:
        notes.append("run_tests_in_same_shell: the tests have a shell of their own")
    copies = ScratchFolder()
    tests = copies.path / "tests"
    if (folder / "tests").is_dir():
        shutil.copytree(folder / "tests", tests, symlinks=True)
    tests.mkdir(exist_ok=True)
    shutil.copyfile(folder / "run-tests.sh", tests / "test.sh")
    verifier = Verifier(
        tests=tests, timeout_s=found.max_test_timeout_sec, env={"TEST_DIR": TESTS}, is_separate=False, reads="pytest"
    )
    return TerminalTask(
        name=folder.resolve().name,
        folder=folder,
        instruction=found.instruction,
        verifier=verifier,
        solution=_solution(folder, copies.path / "solution"),
        timeout_s=found.max_agent_timeout_sec,
        environment=folder,
        network="open",
        difficulty=found.difficulty,
        category=found.category,
        notes=tuple(notes),
        scratch=copies,
    )


def _solution(folder: Path, target: Path) -> Path | None:
    """Write the solution of a task as ``solve.sh``, and return its folder; None if the task has no solution."""
    script, commands = folder / "solution.sh", folder / "solution.yaml"
    if script.is_file():
        target.mkdir()
        shutil.copyfile(script, target / "solve.sh")
        return target
    if not commands.is_file():
        return None
    lines = read_yaml(commands, list[_Command])
    if any(not line.append_enter for line in lines):
        raise ConfigError([f"{commands}: append_enter: envkit runs the solution as a script, so it must be true"])
    target.mkdir()
    (target / "solve.sh").write_text("".join(f"{line.command}\n" for line in lines), encoding="utf-8")
    return target


def _is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()
