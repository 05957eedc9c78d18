"""Flags: why a person should look at a submission."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL, PIPE

import anyio

from ..checkout import MAX_FILE, content_of

DEADLINE_S = 20.0
"""Maximum seconds of the process that finds the names of a submission."""
_MAX_FLAGS = 100
_PROGRAM = str(Path(__file__).with_name("names.py"))


async def flags_of(tree: Path, changes: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return what changed Python files have that could be an attempt to deceive the grader, and the tree has not.

    The flags are found in the syntax trees of the files, in a process with a deadline. A submission for which that
    process fails has a flag that says so.
    """
    texts = {
        path: [content_of(tree, path).decode("latin-1"), content.decode("latin-1")]
        for path, content in sorted(changes.items())
        if len(content) <= MAX_FILE
    }
    if not texts:
        return ()
    with anyio.move_on_after(DEADLINE_S):
        done = await anyio.run_process(
            [sys.executable, "-I", _PROGRAM], input=json.dumps(texts).encode(), stdout=PIPE, stderr=DEVNULL, check=False
        )
        if done.returncode == 0:
            found: list[str] = json.loads(done.stdout)
            more = [f"{len(found) - _MAX_FLAGS} more"] if len(found) > _MAX_FLAGS else []
            return (*(one[:200] for one in found[:_MAX_FLAGS]), *more)
        return ("the changed files end the program that reads them",)
    return ("the changed files cannot be read in time",)
