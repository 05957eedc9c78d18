"""Tiny portable tasks for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envkit.environments.terminal.formats import write_task

CHECK = """
from harness import read, require, run

def verify():
    require(read("/workspace/answer.txt").strip() == "3", "wrong answer")
    require(run(["sh", "tool.sh"], stdin="b a").stdout == "a b", "the tool is wrong")
"""
SOLUTION = "wc -l < data.txt > answer.txt\necho 'read x y; printf \"$y $x\"' > tool.sh\n"


def write_tiny(folder: Path, *, check: str = CHECK, services: str = "", programs: Sequence[str] = ()) -> Path:
    """Write a task to a new folder below `folder` and return its path."""
    path = folder / "tiny"
    write_task(
        path,
        name="tiny",
        instruction="Count the lines of data.txt.",
        files={"data.txt": "1\n2\n"},
        setup="echo 3 >> data.txt\n",
        solution=SOLUTION,
        check={"check.py": check},
        services=services,
        programs=programs,
        category="test",
    )
    return path
