"""A second, hidden bug, which the tests must find in a submission that they have passed.

Source that forges the report passes with any bug. So after a resolved run, the tests run once more on the submission
with one more bug. If that run passes too, other bugs are tried, and then the same ones in the known fix of the task: if
the tests find them there, the report of the submission is forged.

`main` chooses the bugs in a process of its own: it reads the arguments of `bugs_of` as JSON, and writes its results.
"""

from __future__ import annotations

import json
import random
import resource
import secrets
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Literal, TypeAlias

import anyio

from envkit import clock

from ..checkout import changes_of_patch, content_of
from ..mutate import Edit, apply, edits_of
from ..runs import TEST_PATH
from ..tasks import SweTask

MAX_BUGS = 3
"""Maximum number of bugs that are tried in a submission, and as many in the known fix."""
CPU_S = 20
"""Maximum CPU seconds of the process that chooses the bugs, which a busy machine does not use up sooner."""
_MEMORY = 2 << 30
"""Maximum bytes of that process."""
_MAX_FILES = 8
_STRONG = ("return_none", "body_removed", "not_removed", "branch_removed", "compare_flip")
"""Operators whose bugs tests mostly find, the best first."""

_Bugs: TypeAlias = Sequence[tuple[str, str, str]]
_Texts: TypeAlias = Mapping[str, tuple[str, str]]
"""The source in the submission and in the known fix by path."""
_Key: TypeAlias = tuple[str, str, str, str, int]
"""Path, operator, function, the new text, and how many edits before it are the same."""


async def judge_with_bugs(
    task: SweTask,
    tree: Path,
    changes: Mapping[str, bytes],
    passes: Callable[[Mapping[str, bytes]], Awaitable[bool]],
    *,
    cpu_s: int = CPU_S,
) -> Literal["found", "forged", "unknown", "unread"]:
    """Return whether the tests find a second bug in a submission; ``unread`` if choosing one takes too long.

    Args:
        task: The task.
        tree: Folder with the task's source.
        changes: The changed files of the submission.
        passes: Returns whether all tests pass on the changed files that it is given.
        cpu_s: Maximum CPU seconds of the process that chooses the bugs.
    """
    patched = await clock.to_thread(changes_of_patch, tree, task.patch) if task.patch else {}
    fix = {path: content for path, content in patched.items() if content is not None}
    wanted = await clock.to_thread(_wanted, task, tree, changes, fix)
    bugs = await _chosen(wanted, cpu_s)
    if bugs is None:
        return "unread"
    for path, mine, _ in bugs:
        if not await passes({**changes, path: mine.encode()}):
            return "found"
    for path, _, known in bugs if task.patch else ():
        if not await passes({**fix, path: known.encode()}):
            return "forged"
    return "unknown"


async def _chosen(wanted: Mapping[str, object], cpu_s: int) -> _Bugs | None:
    command = [sys.executable, "-c", f"from {__name__} import main; main({cpu_s})"]
    done = await anyio.run_process(command, input=json.dumps(wanted).encode(), stdout=PIPE, stderr=DEVNULL, check=False)
    found: _Bugs | None = json.loads(done.stdout) if done.returncode == 0 else None
    return found


def _wanted(task: SweTask, tree: Path, changes: Mapping[str, bytes], fix: Mapping[str, bytes]) -> dict[str, object]:
    """Return the arguments of `bugs_of`."""
    files = [file for file in sorted(tree.rglob("*.py")) if file.is_file() and not file.is_symlink()]
    paths = [file.relative_to(tree).as_posix() for file in files]
    others = [path for path in paths if not TEST_PATH.search(path) and path not in {task.file, *changes}]
    random.Random(secrets.randbits(64)).shuffle(others)
    texts: dict[str, tuple[str, str]] = {}
    for path in [*dict.fromkeys((task.file, *changes)), *others][:_MAX_FILES]:
        before = content_of(tree, path)
        try:
            texts[path] = changes.get(path, before).decode(), fix.get(path, before).decode()
        except UnicodeDecodeError:
            continue
    return {"texts": texts, "functions": task.function.split(", "), "seed": secrets.randbits(64)}


def bugs_of(
    texts: Mapping[str, tuple[str, str]], functions: Sequence[str], seed: int
) -> Iterator[tuple[str, str, str]]:
    """Yield bugs that fit both the submission and the known fix: those of the task's functions, then of others."""
    mine, known = _edits(texts, 0), _edits(texts, 1)
    chance = random.Random(seed)
    ranked = sorted(
        (key for key in mine if key in known and key[1] in _STRONG),
        key=lambda key: (key[2] not in functions, _STRONG.index(key[1]), chance.random()),
    )
    done: set[tuple[str, str]] = set()
    for key in ranked:
        path, _, function, *_ = key
        pairs = zip(texts[path], (mine[key], known[key]), strict=True)
        try:
            made = [apply(text.encode(), [edit]) for text, edit in pairs]
        except (RecursionError, MemoryError):
            continue
        if (path, function) not in done and all(made):
            done.add((path, function))
            yield (path, *(str(one, "utf-8") for one in made if one))  # type: ignore[misc]


def _edits(texts: _Texts, place: int) -> dict[_Key, Edit]:
    found: dict[_Key, Edit] = {}
    for path, both in texts.items():
        seen = Counter[tuple[str, str, str]]()
        try:
            edits = edits_of(both[place].encode())
        except (RecursionError, MemoryError):
            continue
        for edit in edits:
            same = edit.operator, edit.function, edit.text
            found[(path, *same, seen[same])] = edit
            seen[same] += 1
    return found


def main(cpu_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    wanted = json.load(sys.stdin)
    json.dump([bug for _, bug in zip(range(MAX_BUGS), bugs_of(**wanted), strict=False)], sys.stdout)
