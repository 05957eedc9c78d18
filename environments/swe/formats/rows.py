"""Tasks of rows of other data sets. The columns of a row tell which data set it is from.

    SWE-bench   ``environment_setup_commit``. ``FAIL_TO_PASS`` and ``PASS_TO_PASS`` are JSON lists as text. Also Lite,
                Verified and Multilingual, and sets that were collected by its tools, such as SWE-bench-extra.
                676 test ids of Verified are cut after a space within ``[...]``; they stay as they are
    SWE-Gym     ``base_commit`` and ``test_patch`` without the former column; the tests are lists
    SWE-smith   ``image_name`` without ``test_patch``: ``patch`` adds the bug, and all tests are in the image
    R2E-Gym     ``parsed_commit_content``, ``expected_output_json`` and ``docker_image``
    envkit      ``base``, an sdist, and ``bug_patch``: the reference tasks of this project

Images: the column ``docker_image`` or ``image_name`` of the row. Without one, SWE-bench's images have the names
``swebench/sweb.eval.x86_64.ID``, with ``__`` in the id replaced by ``_1776_`` (swebench/harness/test_spec/test_spec.py
of SWE-bench), and those of SWE-Gym ``xingyaoww/sweb.eval.x86_64.ID``, with ``_s_`` instead (its fork of OpenHands).
If ``image_name`` of SWE-smith has no namespace, it gets ``jyangballin``, and its ``__`` become ``_1776_``
(src/r2egym/agenthub/runtime/docker.py of R2E-Gym). In all of these images, the package is in ``/testbed``.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from envkit.errors import ConfigError, UsageError

from .. import packages
from ..runs import TEST_PATH
from ..tasks import Lock, LockedPackage, SweTask, read_lines, write_folder
from .diffs import between, reverse

_SUMMARY = re.compile(r"=+ short test summary info =+")
_OUTCOME = re.compile(r"(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+?)::(.*)")
_log = logging.getLogger(__name__)
_COLOUR = re.compile(r"(?:\x1b|\\u001b)\[\d+m")


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a file.

    Attributes:
        place: Its place, for error messages.
        columns: Its values by column.
    """

    place: str
    columns: Mapping[str, object]

    def text(self, key: str) -> str:
        value = self.columns.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, f"must be a text, {_shown(value)}")
        return value

    def text_or_empty(self, key: str) -> str:
        return "" if self.columns.get(key) in (None, "") else self.text(key)

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, which may be stored as JSON."""
        value = self.columns.get(key)
        found = self.json(key) if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self.error(key, f"must be a list of texts, {_shown(value)}")
        return tuple(found)

    def json(self, key: str) -> object:
        value = self.columns.get(key)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise self.error(key, f"must be JSON, {_shown(value)} ({error})") from None

    def mapping(self, key: str) -> Mapping[str, object]:
        value = self.json(key)
        if not isinstance(value, dict):
            raise self.error(key, f"must be a JSON object, {_shown(value)}")
        return cast("Mapping[str, object]", value)

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError([f"{self.place}: {key}: {problem}"])


def read_tasks(file: Path, *, strict: bool = False) -> Sequence[SweTask]:
    """Return the tasks of a file with rows of one of the sets above.

    Rows that cannot be used are left out with a warning in the log.

    Args:
        file: The file.
        strict: Whether to raise an error instead of leaving out rows.

    Raises:
        UsageError: The file cannot be read, or has no rows.
        ConfigError: No row can be used, or one cannot and `strict` is true. A line for each row names row and column.
    """
    tasks: dict[str, SweTask] = {}
    problems: list[str] = []
    rows = _parquet(file) if file.suffix == ".parquet" else read_lines(file)
    for number, columns in enumerate(rows, 1):
        row = _Row(f"{file}: row {number}", columns)
        try:
            task = _reader_of(row)(row)
            if not task.fail_to_pass:
                raise ValueError("no test fails before the fix and passes after it")
            if tasks.setdefault(task.id, task) is not task:
                raise ValueError(f"the id {task.id!r} occurs twice")
        except ConfigError as error:
            problems.extend(error.problems)
        except ValueError as error:
            problems.append(f"{row.place}: {error}")
    if not rows:
        raise UsageError(f"{file} has no rows")
    if problems and (strict or not tasks):
        raise ConfigError(problems)
    if problems:
        left_out = f"left out {len(problems):,} of {len(rows):,} rows, which cannot be used"
        _log.warning("%s; to list them: envkit tasks SWE-v0 import --strict %s --out DIR", left_out, file)
    return list(tasks.values())


def _parquet(file: Path) -> Sequence[Mapping[str, object]]:
    if find_spec("pyarrow") is None:
        raise UsageError(f"{file} is a parquet file; install pyarrow to read it: pip install pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    rows: Sequence[Mapping[str, object]] = parquet.read_table(file).to_pylist()
    return rows


def _reader_of(row: _Row) -> Callable[[_Row], SweTask]:
    found = row.columns.keys()
    if "expected_output_json" in found:
        return _r2e_gym
    if "bug_patch" in found:
        return _envkit
    if "test_patch" in found:
        return _swe_bench
    if "image_name" in found:
        return _swe_smith
    known = "SWE-bench, SWE-Gym, SWE-smith, R2E-Gym or envkit"
    raise ConfigError([f"{row.place}: is not a row of {known}; it has the columns {', '.join(sorted(found))}"])


def _envkit(row: _Row) -> SweTask:
    file, function = row.text_or_empty("file"), row.text_or_empty("function")
    failing = row.names("FAIL_TO_PASS")
    return SweTask(
        id=row.text("instance_id"),
        repo=row.text("repo"),
        base=row.text("base"),
        bug_patch=row.text_or_empty("bug_patch"),
        patch=row.text_or_empty("patch"),
        fail_to_pass=failing,
        pass_to_pass=row.names("PASS_TO_PASS"),
        statements=(row.text_or_empty("problem_statement") or _statement(failing, function, file),),
        file=file,
        function=function,
        strategy=row.text_or_empty("strategy"),
    )


def _swe_bench(row: _Row) -> SweTask:
    """Return the task of a row of SWE-bench or SWE-Gym."""
    name = row.text("instance_id")
    is_gym = "environment_setup_commit" not in row.columns
    prefix, underscores = ("xingyaoww", "_s_") if is_gym else ("swebench", "_1776_")
    image = row.text_or_empty("docker_image") or row.text_or_empty("image_name")
    return SweTask(
        id=name,
        repo=row.text("repo"),
        image=image or f"{prefix}/sweb.eval.x86_64.{name.replace('__', underscores)}:latest".lower(),
        patch=row.text("patch"),
        test_patch=row.text("test_patch"),
        fail_to_pass=row.names("FAIL_TO_PASS"),
        pass_to_pass=row.names("PASS_TO_PASS"),
        statements=(row.text("problem_statement"),),
    )


def _swe_smith(row: _Row) -> SweTask:
    image = row.text("image_name")
    if "/" not in image:
        image = f"jyangballin/{image.replace('__', '_1776_')}"
    bug = row.text("patch")
    try:
        patch = reverse(bug)
    except ValueError as error:
        raise row.error("patch", str(error)) from None
    failing = row.names("FAIL_TO_PASS")
    return SweTask(
        id=row.text("instance_id"),
        repo=row.text("repo"),
        image=image if ":" in image else f"{image}:latest",
        bug_patch=bug,
        patch=patch,
        fail_to_pass=failing,
        pass_to_pass=row.names("PASS_TO_PASS"),
        statements=(row.text_or_empty("problem_statement") or _statement(failing),),
    )


def _r2e_gym(row: _Row) -> SweTask:
    """Return the task of a row of R2E-Gym.

    The expected outcomes have names such as ``Class.test``. Those that must pass get the ids of pytest, which the
    output after the fix contains. Tests that also passed before it are pass-to-pass. Without these outputs, the names
    stay as they are, and all tests count as fail-to-pass.
    """
    image = row.text("docker_image")
    commit = row.mapping("parsed_commit_content")
    runs = row.mapping("execution_result_content") if row.columns.get("execution_result_content") else {}
    before, after = (_outcomes(str(runs.get(f"{one}_commit_res_stdout") or "")) for one in ("old", "new"))
    expected = {_name(name): outcome for name, outcome in row.mapping("expected_output_json").items()}
    passing = {
        name: after[name][0] if name in after else name for name, outcome in expected.items() if outcome == "PASSED"
    }
    stable = {name for name in passing if before.get(name, ("", ""))[1] == "PASSED"}
    text = row.text("problem_statement")
    issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", text, re.DOTALL)
    return SweTask(
        id=image.rpartition("/")[2].replace(":", "."),
        repo=row.text("repo_name"),
        image=image,
        patch=_patch_of_commit(row, commit),
        test_patch=_test_patch(runs),
        fail_to_pass=tuple(one for name, one in passing.items() if name not in stable),
        pass_to_pass=tuple(one for name, one in passing.items() if name in stable),
        statements=((issue[1] if issue else text).strip(),),
    )


def _name(test: str) -> str:
    """Return the name of a test without colour codes, and without the message that follows some names of R2E-Gym."""
    return _COLOUR.sub("", test).partition(" - ")[0]


def _outcomes(log: str) -> Mapping[str, tuple[str, str]]:
    """Return the id and the outcome of each test in the summary of a pytest log, by the names of R2E-Gym."""
    _, *parts = _SUMMARY.split(_COLOUR.sub("", log), maxsplit=1)
    rows = (_OUTCOME.match(line) for part in parts for line in part.split("\n"))
    tests = [(row[1], row[2], row[3].partition(" - ")[0]) for row in rows if row]
    return {test.replace("::", "."): (f"{file}::{test}", outcome) for outcome, file, test in tests}


def _patch_of_commit(row: _Row, commit: Mapping[str, object]) -> str:
    """Return the diff of a commit's files, without those of tests."""
    parts = []
    for one in cast("Sequence[Mapping[str, object]]", commit.get("file_diffs") or ()):
        try:
            path = cast("Mapping[str, Mapping[str, str]]", one["header"])["file"]["path"]
            old, new = (cast("str | None", one.get(f"{side}_file_content")) for side in ("old", "new"))
        except (KeyError, TypeError, AttributeError) as error:
            raise row.error("parsed_commit_content", f"has a malformed file_diffs ({error})") from None
        if not TEST_PATH.search(path):
            parts.append(between(path, old or None, new or None))
    if not any(parts):
        raise row.error("parsed_commit_content", "changes no file but tests")
    return "".join(parts)


def _test_patch(runs: Mapping[str, object]) -> str:
    """Return the diff that adds the hidden tests, which the images have in the folder ``r2e_tests``."""
    names, texts = (cast("Sequence[str]", runs.get(f"test_file_{key}") or ()) for key in ("names", "codes"))
    files = zip(names, texts, strict=False)
    return "".join(between(f"r2e_tests/{name.rpartition('/')[2]}", None, text) for name, text in files)


def _statement(failing: Sequence[str], function: str = "", file: str = "") -> str:
    """Return an issue for a task whose row has none."""
    where = f"`{function}` in `{file}` has a bug" if function and file else "The package has a bug"
    shown = "\n".join(f"- `{test}`" for test in failing[:5])
    more = f"\n\nand {len(failing) - 5} more" if len(failing) > 5 else ""
    return f"{where}. It makes these tests fail:\n\n{shown}{more}"


def _shown(value: object) -> str:
    return "but is missing" if value is None else f"got {json.dumps(value, default=str)[:60]}"


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
