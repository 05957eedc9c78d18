"""Flags: why a person should look at a submission."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import anyio

from ..checkout import MAX_FILE, content_of

DEADLINE_S = 20.0
"""Maximum seconds of a process that reads source of a submission."""
_MAX_FLAGS = 100
_PROGRAM = str(Path(__file__).with_name("names.py"))


async def flags_of(tree: Path, changes: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the new signs of an attempt to deceive the grader in changed Python files.

    The flags are found in the syntax trees of the files. If the search fails, a flag says so.
    """
    texts = {
        path: [content_of(tree, path).decode("latin-1"), content.decode("latin-1")]
        for path, content in sorted(changes.items())
        if len(content) <= MAX_FILE
    }
    if not texts:
        return ()
    found = await in_process(["-I", _PROGRAM], texts)
    if found is None:
        return (f"the changed files cannot be read within {DEADLINE_S:g} s and 2 GiB",)
    more = [f"{len(found) - _MAX_FLAGS} more"] if len(found) > _MAX_FLAGS else []
    return (*(one[:200] for one in found[:_MAX_FLAGS]), *more)


async def in_process(arguments: Sequence[str], given: object) -> Any:
    """Run a Python program with `given` as JSON input, and return its JSON output; None if it fails or takes too long.

    The limits are needed because a hostile file may take any time or memory to parse.
    """
    with anyio.move_on_after(DEADLINE_S):
        command = [sys.executable, *arguments]
        done = await anyio.run_process(
            command, input=json.dumps(given).encode(), stdout=PIPE, stderr=DEVNULL, check=False
        )
        return json.loads(done.stdout) if done.returncode == 0 else None
    return None
