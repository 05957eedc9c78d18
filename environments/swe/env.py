"""SWE: find and fix a bug in a Python package, with tools in a sandbox. The package's own tests decide.

Observation  the text of an issue; later the results of the tools
Actions      calls of bash, view_file, edit_file and submit. The submission is the changed source of the package, in
             ``/workspace/repo``, at the end of the episode
Reward       after the last step: 1.0 if all tests that passed before the bug was added pass again, else 0.0
Ends         terminated after submit; truncated after ``max_turns`` actions
Tasks        the tasks of a folder that ``envkit tasks SWE-v0 build`` made
Options      see `SweOptions`, and the limits of `ToolEnv`
Info         ``task``, ``folder`` and ``issue`` of a reset: the task's id, the package's folder, and the text of the
             issue alone. ``action_is_valid``: whether the action is a valid call
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from shlex import quote
from typing import ClassVar

import msgspec

from envkit import clock
from envkit.errors import MissingFileError, OptionError, RefusedFileError, TooLargeError
from envkit.protocols import Sandbox
from envkit.types import JSON, Options, Reset, Task, stable_hash

from ..options import check_boolean, check_image, check_integer, check_path, check_split, override_known
from ..split import SPLITS, Split
from ..tasks import Plan, SandboxTask, TaskEnv
from .checkout import MAX_FILE, apply_command, between, content_of, source_of
from .grading import MAX_CHANGES, Verdict, grade_changes, grade_limit_s, module_of, sort_out
from .packages import environment
from .runs import REPO, spec_of
from .tasks import Lock, SweTask, read_folder

OWN_TASKS = Path(__file__).with_name("own")
"""The tasks of the package that envkit contains."""

_MAX_LINES = 5000
"""Maximum lines of a file whose diff is kept; a longer one is kept whole, because its diff could take hours."""
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
        tasks: Folder that ``envkit tasks SWE-v0 build`` made; None means the tasks of the package that envkit contains.
        split: Only tasks of this split ("train", "validation" or "eval"); None means any.
        statement: Level of the issue's text. 1 names the function and says what is wrong, 2 describes the symptom, and
            3 names the files with failing tests. Only with 3 are these files in the agent's sandbox.
        image: Image of the sandboxes, with Python 3.10 or later; None means the default of the backend.
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
        check_split(self.split)
        check_integer("statement", self.statement, low=1, high=3)
        check_boolean("in_image", self.in_image)
        check_image(self.image)
        check_path("tasks", self.tasks)
        check_path("review", self.review)

    @property
    def lock(self) -> Lock:
        """What the tasks need."""
        return read_folder(self._folder)[1]

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

    Tasks with a bug in the same function are in the same split. Validation and eval each get the tasks of a tenth of
    the functions, and of at least one. With fewer than three functions, all tasks are in every split.
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
    return f"{task.repo} {task.file} {task.function}"


class SweTasks:
    """The tasks of the environment; see `envkit.protocols.TaskSet`. The split ``any`` has all of them."""

    splits: Sequence[str] = (*SPLITS, "any")

    def __init__(self, **options: JSON) -> None:
        self._options: Options = options
        options_of(options)  # rejects wrong options

    def count(self, split: str) -> int:
        return len(options_of(self._with(split)).all())

    def task(self, split: str, index: int) -> Task:
        return Task("SWE-v0", index, self._with(split))

    def names(self, split: str) -> Sequence[str]:
        return [task.id for task in options_of(self._with(split)).all()]

    def _with(self, split: str) -> Options:
        return {**self._options, "split": None if split == "any" else split}


def options_of(options: Options) -> SweOptions:
    """Return the options of SWE among `options`, which may also contain the limits of `ToolEnv`."""
    return override_known(SweOptions(), options)


class SweBug(SandboxTask[Mapping[str, bytes]]):
    """A bug of a package. The agent's work consists of the changed source files, by path.

    `tree` is the folder of this machine with the source; `environment`, that of the tests, or None if the image has it.
    """

    def __init__(self, bug: SweTask, options: SweOptions, tree: Path, environment: Path | None) -> None:
        self.name, self.bug, self.tree, self.environment = bug.id, bug, tree, environment
        self.spec = spec_of(environment, image=options.image)
        module = module_of(bug.file)
        self.modules = [module.partition(".")[0]] if module else []
        self.timeout_s = options.lock.timeout_s(bug.base)
        self.judge_limit_s = grade_limit_s(self.timeout_s)
        self._hidden = frozenset[str]() if options.statement == 3 else bug.test_files
        self.prepared_key = (tree, self._hidden)
        self.issue = bug.statements[min(options.statement, len(bug.statements)) - 1].strip()
        tests = "" if options.statement == 3 else "The tests that fail because of it were removed. "
        self.statement = (
            f"The folder {REPO} has the source of a Python package with a bug. Find the bug, and fix it in the source."
            f"\n\n{self.issue}\n\n{tests}Run tests with `python3 -m pytest`. Call submit when you are done. "
            "Changes of existing Python files of the package count; new files, and changes of tests or configuration, "
            "do not."
        )

    @property
    def solution(self) -> Plan | None:
        return Plan([apply_command(self.bug.patch)])

    @property
    def words(self) -> Mapping[str, str]:
        bug = self.bug
        return {
            "TESTFILES": " ".join(sorted(bug.test_files)),
            "TESTS": repr([*bug.fail_to_pass, *bug.pass_to_pass]),
            "FUNCTIONS": repr(bug.function.split(", ")),
            "FILE": bug.file,
            "PACKAGE": "==".join(bug.base.removesuffix(".tar.gz").rsplit("-", 1)),
        }

    def with_source(self, source: str) -> Plan:
        return Plan([f"cat >> {quote(self.bug.file)} <<'END'\n{source}\nEND"])

    async def prepare(self, sandbox: Sandbox) -> None:
        """Write the package, without the hidden tests; as one commit if the sandbox has git."""
        await sandbox.upload(self.tree, REPO)
        if self._hidden:
            await sandbox.exec(["rm", "-f", "--", *(f"{REPO}/{path}" for path in sorted(self._hidden))])
        await sandbox.exec(["sh", "-c", _COMMIT])

    async def collect(self, sandbox: Sandbox) -> Mapping[str, bytes]:
        """Return the changed files of the package that grading may accept. Others are not read.

        Links are never followed out of the sandbox.
        """
        changes: dict[str, bytes] = {}
        size = 0
        for path, before in (await clock.to_thread(_sources, self.tree, self.bug)).items():
            try:
                content = await sandbox.read(f"{REPO}/{path}", max_bytes=MAX_FILE)
            except (MissingFileError, RefusedFileError, TooLargeError):
                continue
            if content == before:
                continue
            size += len(content)
            if size > MAX_CHANGES:
                break
            changes[path] = content
        return changes


class Swe(TaskEnv):
    """An environment with one bug per episode.

    Its `data` is the folder ``swe``, in which source distributions, trees and environments of tests are cached. A
    task's options override single `options` for one episode.

    Raises:
        OptionError: An option is unknown or its value is invalid.
    """

    options: ClassVar[Options] = asdict(SweOptions())
    max_turns = 100
    max_output = 10_100  # both ends of an output with 5,000 characters, and its exit code
    task: SweBug
    _chosen: SweOptions

    @classmethod
    def check_options(cls, options: Options) -> None:
        options_of(options)

    @classmethod
    def task_of(cls, seed: int, options: Options) -> SweBug:
        """Return the task of a seed, without the files of its package."""
        chosen = options_of(options)
        return SweBug(chosen.task(seed), chosen, Path(), None)

    async def open_task(self, seed: int, options: Options) -> SweBug:
        """Return the task of a seed. If its package or the environment of its tests is missing in `data`, make it."""
        self._chosen = chosen = options_of(options)
        bug, folder, lock = chosen.task(seed), self.data["swe"], chosen.lock
        tree = await source_of(bug, folder, lock)
        install = partial(environment, lock.environment, folder / "environments", lambda line: None)
        return SweBug(bug, chosen, tree, None if chosen.in_image else await clock.to_thread(install))

    async def reset(self, *, seed: int, options: Options) -> Reset:
        """Start an episode; see `ToolEnv.reset`."""
        start = await super().reset(seed=seed, options=options)
        return msgspec.structs.replace(start, info={**start.info, "folder": REPO, "issue": self.task.issue})

    async def start(self, seed: int, options: Options) -> str:
        await self.sandbox.shell().run(f"cd {REPO}")
        return self.task.statement

    async def judge_work(self, work: Mapping[str, bytes]) -> Verdict:
        """Run the tests of the package on the changed source; see `grade_changes`."""
        task, chosen = self.task, self._chosen
        verdict = await grade_changes(
            self.sandboxes,
            task.bug,
            task.tree,
            work,
            environment=task.environment,
            image=chosen.image,
            timeout_s=task.timeout_s,
        )
        if chosen.review is not None and (verdict.flags or verdict.problem):
            await clock.to_thread(keep, Path(chosen.review), task.bug, task.tree, work, verdict)
        return verdict


def keep(folder: Path, task: SweTask, tree: Path, changes: Mapping[str, bytes], verdict: Verdict) -> None:
    """Write a file with an episode for a person to review."""
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    small = {path: content for path, content in changes.items() if content.count(b"\n") <= _MAX_LINES}
    content = {
        "task": task.id,
        "diff": "".join(between(path, content_of(tree, path), new) for path, new in small.items()),
        "files": {path: text.decode(errors="replace") for path, text in changes.items() if path not in small},
        "verdict": {"resolved": verdict.resolved, **asdict(verdict)},
    }
    (folder / f"{task.id}-{secrets.token_hex(4)}.json").write_text(json.dumps(content, indent=1))


def _sources(tree: Path, task: SweTask) -> Mapping[str, bytes]:
    """Return the files of a tree that the agent may change, by path."""
    files = {file.relative_to(tree).as_posix(): file for file in sorted(tree.rglob("*.py")) if file.is_file()}
    taken, _ = sort_out(task, tree, dict.fromkeys(files, b"changed"))
    return {path: content_of(tree, path) for path in taken}
