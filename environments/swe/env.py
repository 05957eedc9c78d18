"""SWE: find and fix a bug in a Python package, with tools in a sandbox. The package's own tests decide.

Observation  the text of an issue; later the results of the tools
Actions      calls of bash, view_file, edit_file and submit. The submission is the changed source of the package, in
             ``/workspace/repo``, at the end of the episode
Reward       from the grader, after the last step: 1.0 if all tests pass that passed before the bug was added, else 0.0
Ends         terminated after submit; truncated after ``max_turns`` actions
Tasks        the tasks of a folder that ``envkit swe build`` made
Options      see `SweOptions`, and the limits of `ToolEnv`
Info         ``folder`` and ``issue`` of a reset: the package's folder, and the text of the issue alone.
             ``action_is_valid``: whether the action is a valid call
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar

import msgspec

from envkit import clock
from envkit.errors import MissingFileError, OptionError, RefusedFileError, TooLargeError, UsageError
from envkit.protocols import Judge, Sandbox, SandboxPool
from envkit.types import JSON, Options, Reset, Task, stable_hash

from ..options import check_boolean, check_choice, check_integer, check_path, override
from ..split import SPLITS, Split
from ..tools import ToolEnv
from ..tools.prepared import lease_prepared
from .checkout import MAX_FILE, diff_of, source_of
from .grading import Verdict, grade_changes, module_of
from .packages import environment
from .runs import REPO, spec_of
from .tasks import Lock, SweTask, read_folder

OWN_TASKS = Path(__file__).with_name("own")
"""The tasks of the package that envkit contains."""

_MAX_NEW = 200
_MAX_LISTING = 16 << 20
_LIST = """
import hashlib, json, os, stat, sys
for folder, folders, files in os.walk(sys.argv[1]):
    folders[:] = [name for name in folders if name not in (".git", "__pycache__", ".pytest_cache")]
    for name in files + [name for name in folders if os.path.islink(os.path.join(folder, name))]:
        path = os.path.join(folder, name)
        try:
            found = os.lstat(path)
            is_file = stat.S_ISREG(found.st_mode)
            digest = hashlib.sha256(open(path, "rb").read()).hexdigest() if is_file and found.st_size <= MAX else ""
        except OSError:
            continue
        print(json.dumps([os.path.relpath(path, sys.argv[1]), is_file, bool(found.st_mode & 0o100), digest]))
""".replace("MAX", str(MAX_FILE))
_COPIES = """
import glob, importlib.util, sys
name = sys.argv[1]
found = importlib.util.find_spec(name)
if found is not None:
    print(found.origin or name)
places = {"/usr", "/usr/local", "/opt/*", *(line.split()[1] for line in open("/proc/mounts"))}
for place in sorted(places):
    for file in (name, name + ".py"):
        print(*glob.glob(f"{place}/lib/python3*/*-packages/{file}"), sep="\\n")
"""
_COMMIT = f"""
command -v git > /dev/null || exit 0
cd {REPO} && export GIT_AUTHOR_DATE='2024-01-15T12:00:00Z' GIT_COMMITTER_DATE='2024-01-15T12:00:00Z' HOME=/nonexistent
git -c init.templateDir= -c init.defaultBranch=main init -q && git add -A -f
git -c core.logAllRefUpdates=false -c user.name=envkit -c user.email= commit -q --no-verify --no-gpg-sign -m Start
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweOptions:
    """Options of the environment.

    Attributes:
        tasks: Folder that ``envkit swe build`` made; None means the tasks of the package that envkit contains.
        split: Only tasks of this split ("train", "validation" or "eval"); None means any.
        statement: Level of the issue's text. 1 names the function and says what is wrong, 2 describes the symptom, and
            3 names the files with failing tests. Only with 3 are these files in the agent's sandbox.
        image: Image of the sandboxes, with Python 3.7 or later; None means the default of the backend.
        in_image: Whether the image contains the environment of the tests. If not, sandboxes see that of this machine.
        review: Folder in which the changes and verdicts of suspicious episodes are kept; None to keep none.
    """

    tasks: str | None = None
    split: Split | None = None
    statement: int = 2
    image: str | None = None
    in_image: bool = False
    review: str | None = None

    def __post_init__(self) -> None:
        if self.split is not None:
            check_choice("split", self.split, SPLITS)
        check_integer("statement", self.statement, low=1, high=3)
        check_boolean("in_image", self.in_image)
        if self.image is not None and not isinstance(self.image, str):
            raise OptionError("image", f"must be the name of an image, got {self.image!r}")
        for name, value in (("tasks", self.tasks), ("review", self.review)):
            if value is not None:
                check_path(name, value)

    @property
    def lock(self) -> Lock:
        """What the tasks need."""
        return read_folder(self._folder)[1]

    @property
    def timeouts_s(self) -> Mapping[str, float]:
        """Maximum seconds of a grading run by the name of the source distribution, if its tests were timed."""
        return {package.base: 20 + 4 * package.suite_s for package in self.lock.packages if package.suite_s}

    def all(self) -> Sequence[SweTask]:
        """Return the tasks of the split.

        Raises:
            OptionError: The split has no tasks.
            UsageError, ConfigError: The folder cannot be used.
        """
        found = split_tasks(self._folder, self.split)
        if not found:
            raise OptionError("split", f"{self._folder} has no task of the split {self.split!r}")
        return found

    def task(self, seed: int) -> SweTask:
        """Return the task of a seed, the same in every process."""
        found = self.all()
        return found[seed % len(found)]

    @property
    def _folder(self) -> Path:
        return OWN_TASKS if self.tasks is None else Path(self.tasks).expanduser()


@lru_cache(maxsize=32)
def split_tasks(folder: Path, split: Split | None) -> Sequence[SweTask]:
    """Return the tasks of a split of a folder, in the order of the folder.

    Tasks with a bug in the same function are in the same split. A tenth of the functions, and at least one, belongs to
    each of validation and eval. With fewer than three functions, all tasks are in every split.
    """
    tasks, _ = read_folder(folder)
    ranked = sorted({_group(task) for task in tasks}, key=lambda group: stable_hash("swe split", group))
    if split is None or len(ranked) < 3:
        return tasks
    tenth = max(1, round(len(ranked) / 10))
    bounds = {"eval": (0, tenth), "validation": (tenth, 2 * tenth), "train": (2 * tenth, len(ranked))}
    chosen = set(ranked[slice(*bounds[split])])
    return [task for task in tasks if _group(task) in chosen]


def _group(task: SweTask) -> str:
    return f"{task.repo} {task.file} {task.function}" if task.function else task.id


class SweTasks:
    """The tasks of the environment; see `envkit.protocols.TaskSet`.

    Args:
        options: Options of the environment.
    """

    splits: Sequence[str] = SPLITS

    def __init__(self, **options: JSON) -> None:
        self._options: Options = options
        options_of(options)  # rejects wrong options

    def count(self, split: str) -> int:
        return len(options_of({**self._options, "split": split}).all())

    def task(self, split: str, index: int) -> Task:
        return Task("SWE-v0", index, {**self._options, "split": split})


def options_of(options: Options) -> SweOptions:
    """Return the options among `options` that are not limits of `ToolEnv`."""
    names = {field.name for field in fields(SweOptions)}
    return override(SweOptions(), {name: value for name, value in options.items() if name in names})


class Swe(ToolEnv):
    """An environment with one bug per episode.

    Args:
        sandboxes: Leases the sandboxes of agents and graders.
        judge: Not used.
        data: The folder ``swe``, in which source distributions, trees and environments of tests are cached.
        options: See `SweOptions` and `ToolEnv`; a task's options override single options for one episode.

    Raises:
        OptionError: An option is unknown or its value is invalid.
    """

    options: ClassVar[Options] = asdict(SweOptions())
    max_turns = 100
    max_output = 10_100  # both ends of an output with 5,000 characters, and its exit code
    _task: SweTask
    _chosen: SweOptions
    _tree: Path
    _environment: Path | None

    def __init__(
        self, *, sandboxes: SandboxPool, judge: Judge | None = None, data: Mapping[str, Path], **options: JSON
    ) -> None:
        super().__init__(sandboxes=sandboxes, judge=judge, data=data, **options)
        options_of(options)  # rejects wrong values

    @asynccontextmanager
    async def lease(self, seed: int, options: Options) -> AsyncIterator[Sandbox]:
        """Lease a sandbox with the package of a task."""
        self._chosen = chosen = options_of(options)
        self._task = task = chosen.task(seed)
        folder, lock = self.data["swe"], chosen.lock
        self._tree = await source_of(task, folder, lock)
        install = partial(environment, lock.environment, folder / "environments", lambda line: None)
        self._environment = None if chosen.in_image else await clock.to_thread(install)
        hidden = frozenset[str]() if chosen.statement == 3 else task.test_files
        spec = spec_of(self._environment, image=chosen.image)
        prepare = partial(_prepare, task=task, tree=self._tree, hidden=hidden)
        async with lease_prepared(self.sandboxes, spec, (self._tree, hidden), prepare) as sandbox:
            yield sandbox

    async def reset(self, *, seed: int, options: Options) -> Reset:
        """Start an episode; see `ToolEnv.reset`."""
        start = await super().reset(seed=seed, options=options)
        return msgspec.structs.replace(start, info={**start.info, "folder": REPO, "issue": self._issue})

    @property
    def _issue(self) -> str:
        statements = self._task.statements
        return statements[min(self._chosen.statement, len(statements)) - 1].strip()

    async def start(self, seed: int, options: Options) -> str:
        await self.sandbox.shell().run(f"cd {REPO}")
        tests = "" if self._chosen.statement == 3 else "The tests that fail because of it were removed. "
        return (
            f"The folder {REPO} has the source of a Python package with a bug. Find the bug, and fix it in the source."
            f"\n\n{self._issue}\n\n{tests}Run tests with `python3 -m pytest`. Call submit when you are done. "
            "Changes of existing Python files of the package count; new files, and changes of tests or configuration, "
            "do not."
        )

    async def grade(self) -> float | None:
        """Run the tests of the package on the changed source; see `grade_changes`."""
        changes, left_out = await changes_in(self.sandbox, self._tree, self._task)
        await self.close()  # the grader's sandbox needs its room
        for _ in range(2):
            verdict = await grade_changes(
                self.sandboxes,
                self._task,
                self._tree,
                changes,
                environment=self._environment,
                image=self._chosen.image,
                timeout_s=self._chosen.timeouts_s.get(self._task.base, 600.0),
            )
            if verdict is not None:
                break
        else:
            return None
        verdict = replace(verdict, refused={**left_out, **verdict.refused})
        if self._chosen.review is not None and (verdict.flags or verdict.problem):
            diff = diff_of(self._tree, changes)
            await clock.to_thread(keep, Path(self._chosen.review), self._task, diff, verdict)
        return float(verdict.resolved)


async def changes_in(sandbox: Sandbox, tree: Path, task: SweTask) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
    """Return the changed files of a package in an agent's sandbox, and why others were left out, by path.

    What the sandbox says about its files only decides which files are read. Links are never followed out of it.

    Args:
        sandbox: The sandbox.
        tree: Folder with the source as it was given to the agent.
        task: The task.
    """
    listed = await sandbox.exec(["python3", "-I", "-S", "-c", _LIST, REPO], user="agent", max_output_bytes=_MAX_LISTING)
    known = await clock.to_thread(_listing, tree)
    changes: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    found: set[str] = set()
    for line in listed.stdout.splitlines():
        try:
            path, is_file, is_executable, digest = json.loads(line)
            path.encode()  # fails for names that are not UTF-8
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
        if path in found:
            continue
        found.add(path)
        if (digest, is_executable) == known.get(path):
            continue
        if path not in known and len(changes) + len(left_out) >= _MAX_NEW:
            left_out["..."] = f"there are more than {_MAX_NEW} new files"
        elif not is_file:
            left_out[path] = "it is a link or a special file"
        elif path in known and digest == known[path][0]:
            left_out[path] = "only its mode changed"
        else:
            try:
                changes[path] = await sandbox.read(f"{REPO}/{path}", max_bytes=MAX_FILE)
            except (MissingFileError, RefusedFileError, TooLargeError) as error:
                left_out[path] = str(error)
    gone = known.keys() - found - task.test_files
    if listed.exit_code == 0:
        left_out.update(dict.fromkeys(sorted(gone), "it was deleted"))
    return changes, left_out


def keep(folder: Path, task: SweTask, diff: str, verdict: Verdict) -> None:
    """Write a file with an episode for a person to review."""
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    content = {"task": task.id, "diff": diff, "verdict": asdict(verdict)}
    (folder / f"{task.id}-{secrets.token_hex(4)}.json").write_text(json.dumps(content, indent=1))


@lru_cache(maxsize=64)
def _listing(tree: Path) -> Mapping[str, tuple[str, bool]]:
    """Return hash and executability of the files of a tree by their paths."""
    files = [file for file in tree.rglob("*") if file.is_file() and not file.is_symlink()]
    return {
        file.relative_to(tree).as_posix(): (
            hashlib.sha256(file.read_bytes()).hexdigest() if file.stat().st_size <= MAX_FILE else "",
            bool(file.stat().st_mode & 0o100),
        )
        for file in files
    }


async def _prepare(sandbox: Sandbox, *, task: SweTask, tree: Path, hidden: frozenset[str]) -> None:
    """Write a package into an agent's sandbox, without the hidden tests, as one commit if git is there.

    Raises:
        UsageError: The sandbox has another copy of the package, which may be without the bug.
    """
    if module := module_of(task.file):
        found = await sandbox.exec(["python3", "-c", _COPIES, module.partition(".")[0]])
        if copies := found.stdout.split():
            raise UsageError(f"{task.repo} is installed in the sandbox, at {copies[0]}; uninstall it, or use an image")
    await sandbox.upload(tree, REPO)
    if hidden:
        await sandbox.exec(["rm", "-f", "--", *(f"{REPO}/{path}" for path in sorted(hidden))])
    await sandbox.exec(["sh", "-c", _COMMIT])
