"""A tiny portable task for tests."""

from __future__ import annotations

from pathlib import Path

from envkit.environments.terminal.formats import write_task

CHECK = """
from harness import read, require, run

def verify():
    require(read("/workspace/answer.txt").strip() == "3", "wrong answer")
    require(run(["sh", "tool.sh"], stdin="b a").stdout == "a b", "the tool is wrong")
"""
SOLUTION = "wc -l < data.txt > answer.txt\necho 'read x y; printf \"$y $x\"' > tool.sh\n"


def write_tiny(folder: Path, *, check: str = CHECK, services: str = "") -> Path:
    """Write the task to a new folder below `folder` and return its path."""
    path = folder / "tiny"
    write_task(
        path,
        name="test/tiny",
        instruction="Count the lines of data.txt.",
        files={"data.txt": "1\n2\n"},
        setup="echo 3 >> data.txt\n",
        solution=SOLUTION,
        check={"check.py": check},
        services=services,
        category="test",
    )
    return path
