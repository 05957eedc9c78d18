"""A second, hidden bug, which the tests must find in a submission that they have passed.

Source that forges the report passes with any bug. So after a resolved run, the tests run once more on the submission
with one more bug. If that run passes too, other bugs are tried, and then the same ones in the known fix of the task: if
the tests find them there, the report of the submission is forged.

The program `bugs` chooses the bugs in a process of its own.
"""

from __future__ import annotations

import json
import random
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Literal

import anyio

from envkit import clock

from ..checkout import changes_of_patch, content_of
from ..runs import TEST_PATH
from ..tasks import SweTask

MAX_BUGS = 3
"""Maximum number of bugs that are tried in a submission, and as many in the known fix."""
CPU_S = 20
"""Maximum CPU seconds of the process that chooses the bugs, which a busy machine does not use up sooner."""
_MAX_FILES = 8
_PROGRAM = str(Path(__file__).with_name("bugs.py"))


async def judge_with_bugs(
    task: SweTask,
    tree: Path,
    changes: Mapping[str, bytes],
    passes: Callable[[Mapping[str, bytes]], Awaitable[bool]],
    *,
    cpu_s: int = CPU_S,
) -> Literal["found", "forged", "unknown", "unread"]:
    """Return whether the tests find a second bug in a submission; ``unread`` if choosing one takes too long.

    `passes` returns whether all tests pass on the changed files that it is given. The process that chooses the bugs has
    at most `cpu_s` CPU seconds.
    """
    fix = await clock.to_thread(changes_of_patch, tree, task.patch)
    wanted = await clock.to_thread(_wanted, task, tree, changes, fix)
    command = [sys.executable, "-I", "-S", _PROGRAM, str(MAX_BUGS), str(cpu_s)]
    done = await anyio.run_process(command, input=json.dumps(wanted).encode(), stdout=PIPE, stderr=DEVNULL, check=False)
    if done.returncode:
        return "unread"
    bugs: Sequence[tuple[str, str, str]] = json.loads(done.stdout)
    for path, mine, _ in bugs:
        if not await passes({**changes, path: mine.encode()}):
            return "found"
    for path, _, known in bugs:
        if not await passes({**fix, path: known.encode()}):
            return "forged"
    return "unknown"


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
