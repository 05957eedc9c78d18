"""Building of tasks: bugs in packages, each verified by the package's own tests, in sandboxes without a network.

A bug is accepted if at least one and at most 30 % of the stable tests fail with it, a second run in a fresh tree and
with another hash seed fails in the same tests, and the fix restores every byte and passes all tests. Every function
gets at most one bug, and at most a quarter of the bugs are made by the same operator.

The verdict on each bug is recorded in the folder of the tasks at once, so an interrupted build can continue.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec

from envkit import clock
from envkit.errors import CapacityError, SandboxError, SandboxLostError, SandboxStartError, UsageError
from envkit.protocols import SandboxPool
from envkit.types import stable_hash

from . import packages
from .checkout import between, changes_of_patch
from .grading import Verdict, grade_changes
from .mutate import Edit, apply, edits_of
from .runs import REPO, TEST_PATH, RunSettings, TestRun, run_tests, spec_of
from .statements import Symptom, statements
from .tasks import Lock, LockedPackage, SweTask, write_folder

MAX_SHARE = 0.3
"""Maximum share of the tests that a bug makes fail."""
_TRIES = 8
"""Maximum number of bugs that are tried, for each that is wanted."""
_BASELINE_TIMEOUT_S = 900.0
_HASH_SEED = 7
"""Hash seed of runs with a bug, and of one without; tests that depend on it are not stable."""
_MAX_MESSAGES, _MAX_MESSAGE = 20, 2000
_NOT_SOURCE = re.compile(
    r"(^|/)(docs?|examples?|bench\w*|tools|scripts|build)/|(^|/)(setup|_version|__main__|noxfile|tasks)\.py$"
)

_TRACER = """
import dis, json, sys, threading

_lines, _hooks = {}, {}

def _trace(frame, event, argument):
    code = frame.f_code
    if not code.co_filename.startswith("REPO/"):
        return None
    if id(code) not in _lines:
        every = {line for _, line in dis.findlinestarts(code) if line}
        missing = set(every)
        def hook(frame, event, argument):
            missing.discard(frame.f_lineno)
            return hook
        _lines[id(code)], _hooks[id(code)] = (code, every, missing), hook
    if not _lines[id(code)][2]:
        return None
    return _hooks[id(code)](frame, event, argument)

sys.settrace(_trace)
threading.settrace(_trace)

def pytest_unconfigure(config):
    sys.settrace(None)
    found = {}
    for code, every, missing in _lines.values():
        found.setdefault(code.co_filename[len("REPO/"):], set()).update(every - missing)
    with open("REPO/envkit_lines.json", "w") as file:
        json.dump({name: sorted(lines) for name, lines in found.items()}, file)
""".replace("REPO", REPO)
"""A pytest plugin that records which lines of the package ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """What to build.

    Attributes:
        want: Number of tasks of each package.
        seed: Chooses the bugs.
        combine: Largest number of bugs of a task. The tasks of a package have 1, 2, ... `combine` bugs in turn.
        jobs: Number of sandboxes at once.
        more: Requirements of the tests' environment, for packages that are not in `packages.TESTED_PACKAGES`.
        command: The command to record in the lock file.
    """

    want: int = 10
    seed: int = 0
    combine: int = 1
    jobs: int = 2
    more: tuple[str, ...] = ()
    command: str = "envkit tasks SWE-v0 build"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """Count of the tried bugs of a package.

    Attributes:
        package: File name of the source distribution, without its suffix.
        tasks: Number of tasks.
        tried: Count of tried bugs and combinations of bugs by verdict: ``accepted``; ``survived``: no test fails;
            ``broad``: too many fail; ``hung``: a test took too long, or the run did not end; ``lost``: the sandbox was
            lost; ``masked``: a test that fails with one of the bugs passes with all of them; ``unstable``: the next run
            differs.
        seconds: Seconds that the verification of all bugs took, summed up.
        reason: Why the first ``unstable`` bug was not accepted.
    """

    package: str
    tasks: int
    tried: Mapping[str, int]
    seconds: float
    reason: str = ""


class _Baseline(msgspec.Struct, frozen=True, kw_only=True, tag="baseline"):
    """Runs of the tests without a bug.

    Attributes:
        inputs: Hash of the source distribution and requirements of the environment.
        stable: Tests that passed in all runs.
        unstable: Number of all other tests and of files that cannot be collected.
        lines: Lines that ran, by file.
    """

    inputs: tuple[str, ...]
    stable: tuple[str, ...]
    unstable: int
    lines: dict[str, list[int]]
    suite_s: float
    longest_s: float


class _Trial(msgspec.Struct, frozen=True, kw_only=True, tag="trial"):
    """A bug that was tried.

    Attributes:
        bug: The edits as text.
        verdict: See `BuildReport.tried`; ``found``: tests fail with it, and no further check was made.
        failing: Tests that fail. `messages` say why some of them do.
        reason: Why it is ``unstable``.
    """

    bug: str
    verdict: str
    failing: tuple[str, ...] = ()
    messages: dict[str, str] = {}
    seconds: float = 0.0
    reason: str = ""


_Bug = tuple[str, tuple[Edit, ...]]
"""A file and the edits in it."""


async def build(
    sandboxes: SandboxPool,
    requirements: Sequence[str],
    folder: Path,
    *,
    data: Path,
    settings: BuildSettings,
    announce: Callable[[str], None] = lambda line: None,
    on_task: Callable[[str, int], None] = lambda package, tasks: None,
) -> list[BuildReport]:
    """Make a folder with tasks of packages such as ``semver==3.1.1``; continue if an earlier call was interrupted.

    `data` is the folder of source distributions and environments. `on_task` is called with a package and its number of
    tasks, each time that it gets one more.

    Raises:
        UsageError: A package cannot be fetched, or has no tests that pass; or pip cannot install what the tests need.
    """
    needed = packages.environment_of(requirements, settings.more)
    environment = await clock.to_thread(packages.environment, needed, data / "environments", announce)
    tasks: list[SweTask] = []
    locked: list[LockedPackage] = []
    reports: list[BuildReport] = []
    for requirement in requirements:
        base = await clock.to_thread(packages.fetch, requirement, data / "sdists")
        tree = await clock.to_thread(packages.unpack, base, data / "trees")
        name = base.name.removesuffix(".tar.gz")
        inputs = (packages.sha256_of(base), *needed)
        builder = _Builder(sandboxes, tree, environment, _Journal(folder / "tried" / f"{name}.jsonl"), settings)
        baseline = await builder.measure(inputs, requirement)
        announce(f"{name}: {len(baseline.stable)} stable tests, {baseline.suite_s:.1f} s")
        made = await builder.tasks(base.name, lambda count, name=name: on_task(name, count))  # type: ignore[misc]
        tasks += made
        reports.append(builder.result(name, len(made)))
        if len(made) < settings.want:
            announce(f"{name}: only {len(made)} of {settings.want} tasks; no more bugs were accepted")
            if reports[-1].reason:
                announce(f"{name}: why grading rejected one: {reports[-1].reason}")
        locked.append(
            LockedPackage(
                requirement="" if requirement == packages.OWN else requirement,
                base=base.name,
                sha256="" if requirement == packages.OWN else inputs[0],
                licence=packages.licence_of(tree),
                tests=len(baseline.stable),
                suite_s=round(baseline.suite_s, 1),
            )
        )
        write_folder(folder, tasks, Lock(command=settings.command, environment=needed, packages=tuple(locked)))
    return reports


class _Journal:
    """A file with the baseline of a package and all trials. Rows that are not complete are dropped."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.baseline: _Baseline | None = None
        self.trials: dict[str, _Trial] = {}
        rows = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
        for row in rows:
            self._take(msgspec.json.decode(row, type=_Baseline | _Trial))
        if rows:
            file.write_bytes(b"".join(row + b"\n" for row in rows))

    def add(self, row: _Baseline | _Trial) -> None:
        if isinstance(row, _Baseline):
            self.trials = {}
            self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("wb" if isinstance(row, _Baseline) else "ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        self._take(row)

    def _take(self, row: _Baseline | _Trial) -> None:
        if isinstance(row, _Baseline):
            self.baseline = row
        else:
            self.trials[row.bug] = row


class _Builder:
    """Makes the tasks of one package."""

    def __init__(
        self, sandboxes: SandboxPool, tree: Path, environment: Path, journal: _Journal, settings: BuildSettings
    ) -> None:
        self._sandboxes = sandboxes
        self._tree = tree
        self._environment = environment
        self._journal = journal
        self._settings = settings
        self.jobs = settings.jobs
        self._places = anyio.Semaphore(settings.jobs)
        self._used: dict[str, _Trial] = {}

    async def measure(self, inputs: tuple[str, ...], requirement: str) -> _Baseline:
        """Return the baseline of the package."""
        known = self._journal.baseline
        if known is not None and known.inputs == inputs:
            return known
        began = clock.stopwatch()
        first, _ = await self._run({}, RunSettings(timeout_s=_BASELINE_TIMEOUT_S))
        suite_s = clock.stopwatch() - began
        if first.exit_code not in (0, 1) or not first.passed:
            last = next((line for line in reversed(first.result.stderr.split("\n")) if line.strip()), "")
            raise UsageError(
                f"{requirement}: no test of its source distribution passes here (pytest: {last.strip('= ')[:200]}); "
                "add what the tests import with --with, or choose one of: envkit tasks SWE-v0 packages"
            )
        second, _ = await self._run({}, RunSettings(timeout_s=_BASELINE_TIMEOUT_S, hash_seed=_HASH_SEED))
        traced = RunSettings(timeout_s=_BASELINE_TIMEOUT_S, arguments=("-p", "envkit_tracer"))
        third, lines = await self._run({"envkit_tracer.py": _TRACER.encode()}, traced, read="envkit_lines.json")
        every = first.passed & second.passed & third.passed
        stable = sorted(test for test in every if first.outcomes[test] == "passed")
        baseline = _Baseline(
            inputs=inputs,
            stable=tuple(stable),
            unstable=len(first.outcomes.keys() | first.messages.keys()) - len(stable),
            lines=msgspec.json.decode(lines, type=dict[str, list[int]]),
            suite_s=suite_s,
            longest_s=max(first.seconds.values()),
        )
        self._journal.add(baseline)
        return baseline

    async def tasks(self, base: str, on_task: Callable[[int], None]) -> list[SweTask]:
        """Return the tasks, verified one after the other in a random order of the bugs."""
        sizes = [1 + number % self._settings.combine for number in range(self._settings.want)]
        bugs = _Bugs(self, in_random_order(self._candidates(), self._settings.seed), sum(sizes))
        tasks: list[SweTask] = []
        while len(tasks) < len(sizes):
            bug = await bugs.take(sizes[len(tasks)])
            if bug is None:
                break
            task = await self._task(base, bug, len(tasks))
            if task is not None:
                tasks.append(task)
                on_task(len(tasks))
        return tasks

    def result(self, package: str, tasks: int) -> BuildReport:
        tried = Counter(trial.verdict for trial in self._used.values() if trial.verdict != "found")
        return BuildReport(
            package=package,
            tasks=tasks,
            tried=tried,
            seconds=sum(trial.seconds for trial in self._used.values()),
            reason=next((trial.reason for trial in self._used.values() if trial.reason), ""),
        )

    async def try_bug(self, bug: _Bug) -> _Trial:
        """Return which tests fail with a bug, with the verdict ``found`` if it can become a task."""

        async def decide() -> _Trial:
            try:
                run, _ = await self._run(self._changed(bug), self._limits())
            except SandboxLostError:
                return _Trial(bug=_text(bug), verdict="lost")
            return self._judged(bug, run)

        return await self._once(_text(bug), decide)

    async def _task(self, base: str, bug: _Bug, number: int) -> SweTask | None:
        """Return the task of a bug that tests have found; None if grading disagrees, see `_why_unstable`."""
        found = await self.try_bug(bug)
        parts = [await self.try_bug((bug[0], (edit,))) for edit in bug[1]]
        path, edits = bug
        original, changed = (self._tree / path).read_bytes(), self._changed(bug)[path]
        repo = base.removesuffix(".tar.gz")
        strategy = "+".join(sorted(edit.operator for edit in edits))
        symptoms = [
            Symptom(function=edit.function, file=path, tests=part.failing, messages=part.messages)
            for edit, part in zip(edits, parts, strict=True)
        ]
        task = SweTask(
            id=f"{repo}.{strategy}.{number}",
            repo=repo,
            base=base,
            bug_patch=between(path, original, changed),
            patch=between(path, changed, original),
            fail_to_pass=found.failing,
            pass_to_pass=tuple(test for test in self._baseline.stable if test not in set(found.failing)),
            statements=statements(repo, symptoms, found.failing, self._tree),
            file=path,
            function=", ".join(edit.function for edit in edits),
            strategy=strategy,
            level=sum(edit.weight for edit in edits),
        )

        async def decide() -> _Trial:
            verdict, reason = "accepted", ""
            if found.verdict != "found":
                verdict = found.verdict
            elif not set(found.failing) >= {test for part in parts for test in part.failing}:
                verdict = "masked"
            elif reason := await self._why_unstable(task, changed, original):
                verdict = "unstable"
            return _Trial(bug=f"task {_text(bug)}", verdict=verdict, reason=reason)

        trial = await self._once(f"task {_text(bug)}", decide)
        return task if trial.verdict == "accepted" else None

    async def _why_unstable(self, task: SweTask, changed: bytes, original: bytes) -> str:
        """Return why a task is unstable; empty if grading gives nop 0, with the same failing tests, and the fix 1."""
        with tempfile.TemporaryDirectory() as scratch:
            tree = Path(scratch) / "tree"
            await clock.to_thread(shutil.copytree, self._tree, tree, symlinks=True)
            (tree / task.file).write_bytes(changed)
            fixed = await clock.to_thread(changes_of_patch, tree, task.patch)
            if fixed != {task.file: original}:
                return "the fix does not restore the file"
            verdicts: dict[str, Verdict] = {}

            async def grade(player: str, changes: Mapping[str, bytes]) -> None:
                async with self._places:
                    timeout_s = self._limits().timeout_s
                    with suppress(SandboxLostError, SandboxStartError, CapacityError):
                        verdicts[player] = await grade_changes(
                            self._sandboxes, task, tree, changes, environment=self._environment, timeout_s=timeout_s
                        )

            async with anyio.create_task_group() as graders:
                graders.start_soon(grade, "nop", {})
                graders.start_soon(grade, "oracle", {task.file: original})
        nop, oracle = verdicts.get("nop"), verdicts.get("oracle")
        if nop is None or oracle is None:
            raise SandboxError(f"a sandbox failed while {task.id} was graded; run the command again to continue")
        failing, broken = ([test for test, one in verdict.tests.items() if not one.is_ok] for verdict in (nop, oracle))
        if nop.problem or oracle.problem:
            return nop.problem or oracle.problem
        if other := sorted({*failing} ^ {*task.fail_to_pass}):
            return f"the next run with the bug differs in {other[0]}"
        return f"with the fix, {broken[0]} fails" if broken else ""

    async def _once(self, key: str, decide: Callable[[], Awaitable[_Trial]]) -> _Trial:
        """Return a bug's entry in the journal; a bug that has not been tried is tried and recorded first."""
        if key not in self._journal.trials:
            began = clock.stopwatch()
            made = await decide()
            self._journal.add(msgspec.structs.replace(made, seconds=round(clock.stopwatch() - began, 2)))
        return self._used.setdefault(key, self._journal.trials[key])

    def _judged(self, bug: _Bug, run: TestRun) -> _Trial:
        baseline, limits = self._baseline, self._limits()
        failing = tuple(test for test in baseline.stable if test not in run.passed)
        if run.exit_code is None or max(run.seconds.values(), default=0.0) >= limits.test_timeout_s:
            return _Trial(bug=_text(bug), verdict="hung")
        if not failing:
            return _Trial(bug=_text(bug), verdict="survived")
        if len(failing) > MAX_SHARE * len(baseline.stable):
            return _Trial(bug=_text(bug), verdict="broad")
        shown = [test for test in failing if test in run.messages][:_MAX_MESSAGES]
        messages = {test: run.messages[test][-_MAX_MESSAGE:] for test in shown}
        return _Trial(bug=_text(bug), verdict="found", failing=failing, messages=messages)

    def _candidates(self) -> list[tuple[str, Edit]]:
        """Return all edits on lines that tests run."""
        found: list[tuple[str, Edit]] = []
        for path, lines in sorted(self._baseline.lines.items()):
            is_source = not _NOT_SOURCE.search(path) and not TEST_PATH.search(path)
            if path.endswith(".py") and is_source and (self._tree / path).is_file():
                covered = set(lines)
                edits = edits_of((self._tree / path).read_bytes())
                found += [(path, edit) for edit in edits if edit.line in covered]
        return found

    def is_program(self, bug: _Bug) -> bool:
        """Return whether the edits give a program that is valid and not the same."""
        return apply((self._tree / bug[0]).read_bytes(), bug[1]) is not None

    def _changed(self, bug: _Bug) -> Mapping[str, bytes]:
        path, edits = bug
        changed = apply((self._tree / path).read_bytes(), edits)
        assert changed is not None
        return {path: changed}

    @property
    def _baseline(self) -> _Baseline:
        assert self._journal.baseline is not None
        return self._journal.baseline

    def _limits(self) -> RunSettings:
        """Return the settings of runs with a bug. They end once more tests have failed than a task may have."""
        baseline = self._baseline
        most = int(MAX_SHARE * len(baseline.stable)) + baseline.unstable + 1
        return RunSettings(
            timeout_s=4 * baseline.suite_s + 10,
            test_timeout_s=max(5.0, 10 * baseline.longest_s),
            hash_seed=_HASH_SEED,
            arguments=(f"--maxfail={most}",),
        )

    async def _run(self, files: Mapping[str, bytes], settings: RunSettings, *, read: str = "") -> tuple[TestRun, bytes]:
        """Run all tests with changed or more files; return the run, and the content of the file `read`."""
        async with self._places, self._sandboxes.lease(spec_of(self._environment)) as sandbox:
            await sandbox.upload(self._tree, REPO)
            for path, content in files.items():
                await sandbox.write(f"{REPO}/{path}", content)
            run = await run_tests(sandbox, (), settings)
            return run, await sandbox.read(f"{REPO}/{read}") if read else b""


def in_random_order(edits: Sequence[tuple[str, Edit]], seed: int) -> list[tuple[str, Edit]]:
    """Return pairs of file and edit in an order that depends on `seed`, with the operators in turn."""

    def chance(of: tuple[str, Edit]) -> int:
        return stable_hash(seed, of[0], of[1].start, of[1].end, of[1].text)

    turn: dict[str, int] = {}
    ranked: list[tuple[int, int, tuple[str, Edit]]] = []
    for one in sorted(edits, key=chance):
        operator = one[1].operator
        turn[operator] = turn.get(operator, -1) + 1
        ranked.append((turn[operator], chance(one), one))
    return [one for *_, one in sorted(ranked, key=lambda row: row[:2])]


class _Bugs:
    """Bugs that tests have found, for tasks of one or more bugs in a file: `wanted` bugs of all tasks together."""

    def __init__(self, builder: _Builder, candidates: Sequence[tuple[str, Edit]], wanted: int) -> None:
        self._builder = builder
        self._candidates = list(reversed(candidates))
        self._tries = _TRIES * wanted
        self._quota = max(2, wanted // 4)
        self._operators: Counter[str] = Counter()
        self._functions: set[tuple[str, str]] = set()
        self._tried: list[tuple[str, Edit]] = []
        self._found: dict[str, list[Edit]] = {}

    async def take(self, size: int) -> _Bug | None:
        """Return a file and `size` bugs in it; None if there are no more."""
        while True:
            for path, edits in self._found.items():
                if len(edits) >= size:
                    self._found[path] = edits[size:]
                    return path, tuple(sorted(edits[:size], key=lambda edit: edit.start))
            found = await self._next()
            if found is None:
                return None
            self._found.setdefault(found[0], []).append(found[1])

    async def _next(self) -> tuple[str, Edit] | None:
        """Return the next bug that tests find; None if there are no more. The number of jobs does not change it."""
        while self._tries:
            if not self._tried:
                await self._try_more()
            if not self._tried:
                return None
            path, edit = self._tried.pop(0)
            if not self._is_allowed(path, edit):
                continue
            self._tries -= 1
            if (await self._builder.try_bug((path, (edit,)))).verdict == "found":
                self._operators[edit.operator] += 1
                self._functions.add((path, edit.function))
                return path, edit
        return None

    async def _try_more(self) -> None:
        """Try the next bugs, as many at once as there are jobs."""
        while self._candidates and len(self._tried) < self._builder.jobs:
            path, edit = self._candidates.pop()
            if self._is_allowed(path, edit) and self._builder.is_program((path, (edit,))):
                self._tried.append((path, edit))
        async with anyio.create_task_group() as trials:
            for path, edit in self._tried:
                trials.start_soon(self._builder.try_bug, (path, (edit,)))

    def _is_allowed(self, path: str, edit: Edit) -> bool:
        return (path, edit.function) not in self._functions and self._operators[edit.operator] < self._quota


def _text(bug: _Bug) -> str:
    path, edits = bug
    return f"{path} " + " ".join(f"{edit.start}:{edit.end}={edit.text!r}" for edit in edits)
