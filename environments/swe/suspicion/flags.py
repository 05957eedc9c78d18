"""Flags: why a person should look at a submission."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL, PIPE

import anyio

from ..checkout import MAX_FILE, content_of

_DEADLINE_S = 20.0
"""Maximum seconds of the process that reads the source, because a hostile file may take any time to parse."""
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
    found: list[str] | None = None
    with anyio.move_on_after(_DEADLINE_S):
        command, given = [sys.executable, "-I", _PROGRAM], json.dumps(texts).encode()
        done = await anyio.run_process(command, input=given, stdout=PIPE, stderr=DEVNULL, check=False)
        found = json.loads(done.stdout) if done.returncode == 0 else None
    if found is None:
        return (f"the changed files cannot be read within {_DEADLINE_S:g} s and 2 GiB",)
    more = [f"{len(found) - _MAX_FLAGS} more"] if len(found) > _MAX_FLAGS else []
    return (*(one[:200] for one in found[:_MAX_FLAGS]), *more)
